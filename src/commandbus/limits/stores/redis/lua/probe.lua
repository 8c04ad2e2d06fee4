-- Is Redis there? Returns its clock (microseconds) and the epoch ('' if there is none). KEYS: the epoch
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
return {string.format('%.0f', now), redis.call('GET', KEYS[1]) or ''}
