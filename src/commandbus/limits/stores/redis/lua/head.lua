-- Put before every script that serves one limit. It does nothing unless Redis has the epoch that the caller knows. After
-- FLUSHALL there is no epoch, and later another one. It also does nothing if the caller's permission to ask has expired,
-- even if its message was sent before that: other programs may count the caller as dead by now.
--
-- KEYS: the epoch, the permits (token → microsecond at which its lease ends), the rate, who uses it.
-- ARGV: the epoch, until when the caller may ask (microseconds; 0: for ever), …
-- Only Redis' clock counts: `now`, in microseconds.
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

-- Notes until when stand-alone semaphores hold permits. The fleet checks this before it uses a limit that it does not
-- share.
local function note_semaphores(ends, lease)
    redis.call('HSET', KEYS[3], 'alone', ends)
    if redis.call('PTTL', KEYS[3]) < lease / 1000 + 60000 then
        redis.call('PEXPIRE', KEYS[3], whole(lease / 1000 + 120000))
    end
end

local function is_semaphore(token)
    return string.sub(token, 1, 10) == 'semaphore/'
end

-- Keeps the key for a minute longer than the last lease in it. `lease` is in microseconds.
local function keep_places(lease)
    local left = lease / 1000
    if redis.call('PTTL', KEYS[2]) < left + 1000 then
        redis.call('PEXPIRE', KEYS[2], whole(left + 60000))
    end
end
