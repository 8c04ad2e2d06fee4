-- Begins an epoch. If another program has begun one, returns that one, and it counts. (Two databases may share a Redis.)
-- Exception: the other epoch is a first epoch, and the caller knows an earlier one. Then this Redis has lost its data,
-- and a new epoch begins. An epoch that a former process of this server wrote does not count, because its last permits
-- may not have reached the disk. In the very first epoch nobody can hold a permit yet, so it is open at once. An epoch is
-- id:began:opens:process.
--
-- KEYS: the epoch. ARGV: the epoch that the caller wants to leave ('': it has never had one), a new id, microseconds
-- until the new epoch opens, the id of the server's process.
local found = redis.call('GET', KEYS[1])
if found and found ~= ARGV[1] and string.match(found, '([^:]*)$') == ARGV[4] then
    if ARGV[1] == '' or not string.match(found, '^[^:]*:0:') then
        return found
    end
end
local began, opens = '0', '0'
if found or ARGV[1] ~= '' then
    local time = redis.call('TIME')
    local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
    began, opens = string.format('%.0f', now), string.format('%.0f', now + tonumber(ARGV[3]))
end
local epoch = ARGV[2] .. ':' .. began .. ':' .. opens .. ':' .. ARGV[4]
redis.call('SET', KEYS[1], epoch)
return epoch
