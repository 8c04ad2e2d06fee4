-- Put before every script that serves one limit. It does nothing unless Redis is the one that the caller knows: the epoch
-- is missing after FLUSHALL, and another one after that was noticed. It also does nothing for a caller whose leave has
-- run out: others may have counted it out by now, however long its message was under way.
--
-- KEYS: the epoch, the places (token → microsecond at which its lease ends), the rate.
-- ARGV: the epoch, until when the caller may ask (microseconds; 0: for ever), …
-- Redis' clock is the only one: `now`, in microseconds. An epoch is id:began:opens:server. Nobody who holds no place
-- gets one before `opens`.
local epoch = redis.call('GET', KEYS[1])
if epoch ~= ARGV[1] then
    return {'epoch', epoch or ''}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if tonumber(ARGV[2]) > 0 and now > tonumber(ARGV[2]) then
    return {'stale'}
end
local began, opens = string.match(epoch, '^%x+:(%d+):(%d+):')
began, opens = tonumber(began), tonumber(opens)

local function whole(number)
    return string.format('%.0f', number)
end

-- The key outlives the last lease in it by a minute, and no longer.
local function keep_places()
    local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
    if last[2] then
        redis.call('PEXPIRE', KEYS[2], whole(math.max(0, tonumber(last[2]) - now) / 1000 + 60000))
    end
end
