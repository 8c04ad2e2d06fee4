-- Begins an epoch, unless somebody else has done so: then theirs is answered, and holds. Two databases may share a Redis.
-- But the first epoch of somebody who knew of none is left by who did: this Redis has lost its data.
-- An epoch that a former process of this server wrote is none, because its last permits may not have reached the disk.
-- In the first one of all nobody can hold a permit yet, so it is open at once. An epoch is id:began:opens:process.
--
-- KEYS: the epoch. ARGV: the epoch that the caller wants to leave ('': it has never had one), a new id, microseconds
-- until it opens, which process the server is.
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
