-- Who holds a place, and for how many microseconds more; how many places were given a second of late ('' if none was).
-- Changes nothing. ARGV: …, seconds of the flow
local flow_seconds = tonumber(ARGV[3])
local holders = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. whole(now), '+inf', 'WITHSCORES')
for i = 2, #holders, 2 do
    holders[i] = whole(tonumber(holders[i]) - now)
end
local kept = redis.call('HMGET', KEYS[3], 'flow', 'flow_at')
local flow = ''
if kept[1] then
    local age = math.max(0, now / 1000000 - tonumber(kept[2]))
    flow = string.format('%.9g', tonumber(kept[1]) * math.exp(-age / flow_seconds) / flow_seconds)
end
return {'ok', flow, holders}
