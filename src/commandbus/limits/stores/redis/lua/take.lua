-- Takes permits for as many of the tokens as there are permits, and as the rate allows. A token that has one already
-- keeps it, so a caller that got no reply may ask again. Returns how many tokens, counted from the first, have one.
--
-- ARGV: …, when the epoch began and when it opens to newcomers (microseconds; 0: from the start), seconds of the flow,
-- concurrency (-1: any), calls a second (0: any), burst, lease in microseconds, who uses it, token, …
--
-- Who uses it: `fleet` (only the workers of one database), `shared` (these and stand-alone semaphores) or `semaphore`.
-- A semaphore gets no permit of a limit that the fleet does not share. The fleet gets no permit of such a limit while
-- semaphores still hold some, because nobody could count those after Redis has lost its data.
local began, opens, flow_seconds = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local concurrency, per_second, burst, lease = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local use, owner = ARGV[10], redis.call('GET', KEYS[4])
if use == 'semaphore' then
    if owner == 'fleet' then
        return {'exclusive'}
    end
elseif owner ~= use or redis.call('TTL', KEYS[4]) < 43200 then
    redis.call('SET', KEYS[4], use, 'EX', 86400)
end
if now < opens then
    return {'ok', 0}
end

local wanted = #ARGV - 10
local free, held = wanted, redis.call('ZCARD', KEYS[2])
if held > 0 and (concurrency < 0 or held + wanted > concurrency) then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(now))
    held = redis.call('ZCARD', KEYS[2])
end
if concurrency >= 0 then
    free = concurrency - held
end

local second = now / 1000000
local kept = redis.call('HMGET', KEYS[3], 'tat', 'flow', 'flow_at', 'flow_since', 'epoch', 'alone')
if use == 'fleet' and tonumber(kept[6] or 0) > now then
    for _, token in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. whole(now), '+inf')) do
        if is_semaphore(token) then
            return {'ok', 0, 'semaphores'}
        end
    end
end
local tat = tonumber(kept[1] or 0)
if per_second > 0 then
    if kept[5] ~= epoch and began > 0 then
                -- Calls before this epoch may not be recorded here, so the rate counts as used up when the epoch began.
        tat = math.max(tat, began / 1000000 + burst / per_second)
    end
    local ahead = math.max(tat, second) - second
    free = math.min(free, math.floor(burst - ahead * per_second + 1e-6))
end

local granted, added, ends = 0, 0, whole(now + lease)
for i = 11, #ARGV do
    if added < free then
        added = added + redis.call('ZADD', KEYS[2], ends, ARGV[i])
    elseif not redis.call('ZSCORE', KEYS[2], ARGV[i]) then
        break
    end
    granted = granted + 1
end

if added > 0 then
    keep_places(lease)
    if use == 'semaphore' then
        redis.call('HSET', KEYS[3], 'alone', ends)
    end
    local flow, since, age = added, second, math.huge
    if kept[2] then
        age = math.max(0, second - kept[3])
        flow = kept[2] * math.exp(-age / flow_seconds) + added
        if age <= 5 * flow_seconds then
            since = tonumber(kept[4])
        end
    end
    if per_second > 0 then
        tat = math.max(tat, second) + added / per_second
    end
    redis.call('HMSET', KEYS[3], 'tat', string.format('%.6f', tat), 'epoch', epoch, 'flow', string.format('%.9g', flow),
        'flow_at', string.format('%.6f', second), 'flow_since', string.format('%.6f', since))
        -- The hash is useless once the rate is free again and the flow has decayed.
    local life = math.max(11 * flow_seconds, use == 'semaphore' and lease / 1000000 + 60 or 0)
    if per_second > 0 then
        life = life + burst / per_second
    end
    if age > flow_seconds or redis.call('PTTL', KEYS[3]) < (life - flow_seconds) * 1000 then
        redis.call('PEXPIRE', KEYS[3], whole(life * 1000))
    end
end
return {'ok', granted}
