-- Returns the holders, each with the microseconds left of its lease; how many permits per second were given recently (''
-- if none was); and the clock. Changes nothing. ARGV: …, seconds of the flow
local flow_seconds = tonumber(ARGV[3])
local holders = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. whole(now), '+inf', 'WITHSCORES')
for i = 2, #holders, 2 do
    holders[i] = whole(tonumber(holders[i]) - now)
end
local kept = redis.call('HMGET', KEYS[3], 'flow', 'flow_at', 'flow_since')
local flow = ''
if kept[1] then
    local second = now / 1000000
    local age = math.max(0, second - tonumber(kept[2]))
        -- A count that began recently is still too low: divide by what it can have reached by now.
    local span = math.min(math.max(second - tonumber(kept[3]), 1), 10 * flow_seconds)
    local weight = flow_seconds * (1 - math.exp(-span / flow_seconds))
    flow = string.format('%.9g', tonumber(kept[1]) * math.exp(-age / flow_seconds) / weight)
end
return {'ok', flow, holders, whole(now)}
