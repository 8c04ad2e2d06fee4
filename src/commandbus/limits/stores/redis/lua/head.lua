-- Put before every script that serves one limit. It does nothing unless Redis is the one that the caller knows: the epoch
-- is missing after FLUSHALL, and another one after that was noticed. It also does nothing for a caller whose leave has
-- run out: others may have counted it out by now, however long its message was under way.
--
-- KEYS: the epoch, the permits (token → microsecond at which its lease ends), the rate, who uses it.
-- ARGV: the epoch, until when the caller may ask (microseconds; 0: for ever), …
-- Redis' clock is the only one: `now`, in microseconds.
local epoch = redis.call('GET', KEYS[1])
if epoch ~= ARGV[1] then
    return {'epoch', epoch or ''}
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local leave = tonumber(ARGV[2])
if leave > 0 and now > leave then
    return {'stale'}
end

local function whole(number)
    return string.format('%.0f', number)
end

-- Stand-alone semaphores hold permits until then: the fleet looks for them before it uses a limit that it does not share.
local function note_semaphores(ends, lease)
    redis.call('HSET', KEYS[3], 'alone', ends)
    if redis.call('PTTL', KEYS[3]) < lease / 1000 + 60000 then
        redis.call('PEXPIRE', KEYS[3], whole(lease / 1000 + 120000))
    end
end

local function is_semaphore(token)
    return string.sub(token, 1, 10) == 'semaphore/'
end

-- The key outlives the last lease in it by a minute, and not much more; a lease ends in so many microseconds.
local function keep_places(lease)
    local left = lease / 1000
    if redis.call('PTTL', KEYS[2]) < left + 1000 then
        redis.call('PEXPIRE', KEYS[2], whole(left + 60000))
    end
end
