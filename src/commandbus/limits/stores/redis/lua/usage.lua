-- Returns the holders, each with the microseconds left of its lease; how many permits per second were given recently (''
-- if none was; while the limit is blocked: before that); and the clock. Changes nothing.
-- ARGV: …, seconds of the flow, '1' if the limit is blocked
local flow_seconds, is_blocked = tonumber(ARGV[3]), ARGV[4] == '1'
local holders = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. whole(now), '+inf', 'WITHSCORES')
for i = 2, #holders, 2 do
    holders[i] = whole(tonumber(holders[i]) - now)
end
local kept = redis.call('HMGET', KEYS[3], 'flow', 'flow_at', 'flow_since')
local flow = ''
if kept[1] then
    local second = is_blocked and tonumber(kept[2]) or now / 1000000
    local age = math.max(0, second - tonumber(kept[2]))
        -- A count that began recently is still too low: divide by what it can have reached by now.
    local span = math.min(math.max(second - tonumber(kept[3]), 1), 10 * flow_seconds)
    local weight = flow_seconds * (1 - math.exp(-span / flow_seconds))
    flow = string.format('%.9g', tonumber(kept[1]) * math.exp(-age / flow_seconds) / weight)
end
return {'ok', flow, holders, whole(now)}
