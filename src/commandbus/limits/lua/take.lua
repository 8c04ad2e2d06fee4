-- Takes places for as many of the tokens as there are places, and as the rate allows. A token that has one already keeps
-- it, for longer: so a caller that got no answer may ask again. Answers how many, from the first on, have one.
--
-- ARGV: …, concurrency (-1: any), calls a second (0: any), burst, lease in microseconds, seconds of the flow, token, …
local concurrency, per_second, burst = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local ends, flow_seconds = whole(now + tonumber(ARGV[6])), tonumber(ARGV[7])
if now < opens then
    return {'ok', 0}
end

redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(now))
local free = #ARGV
if concurrency >= 0 then
    free = concurrency - redis.call('ZCARD', KEYS[2])
end

local second = now / 1000000
local kept = redis.call('HMGET', KEYS[3], 'tat', 'flow', 'flow_at', 'epoch')
local tat = tonumber(kept[1] or '0')
if per_second > 0 then
    if kept[4] ~= epoch and began > 0 then
        -- What was called before this epoch may not be in our books: the bucket counts as full when it began.
        tat = math.max(tat, began / 1000000 + burst / per_second)
    end
    local ahead = math.max(tat, second) - second
    free = math.min(free, math.floor(burst - ahead * per_second + 1e-6))
end

local granted, added = 0, 0
for i = 8, #ARGV do
    local held = redis.call('ZSCORE', KEYS[2], ARGV[i])
    if not held then
        if added >= free then
            break
        end
        added = added + 1
    end
    if not held or tonumber(held) < tonumber(ends) then
        redis.call('ZADD', KEYS[2], ends, ARGV[i])
    end
    granted = granted + 1
end

if granted > 0 then
    keep_places()
end
if added > 0 then
    local flow = added
    if kept[2] then
        local age = math.max(0, second - tonumber(kept[3]))
        flow = tonumber(kept[2]) * math.exp(-age / flow_seconds) + added
    end
    local full = 0
    if per_second > 0 then
        tat = math.max(tat, second) + added / per_second
        full = tat - second
    end
    redis.call('HSET', KEYS[3], 'tat', string.format('%.6f', tat))
    redis.call('HSET', KEYS[3], 'flow', string.format('%.9g', flow))
    redis.call('HSET', KEYS[3], 'flow_at', string.format('%.6f', second))
    redis.call('HSET', KEYS[3], 'epoch', epoch)
    redis.call('PEXPIRE', KEYS[3], whole((full + 10 * flow_seconds) * 1000))
end
return {'ok', granted}
