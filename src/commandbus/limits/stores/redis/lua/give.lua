-- Gives back the permits of these tokens, and of no others. It needs no leave: that frees no more than was taken. Programs that
-- wait are told on the channel that has the name of the permits' key; where that is not allowed, they look later.
--
-- KEYS: the epoch, the permits. ARGV: the epoch, token, …
local epoch = redis.call('GET', KEYS[1])
if epoch ~= ARGV[1] then
    return {'epoch', epoch or ''}
end
for i = 2, #ARGV do
    redis.call('ZREM', KEYS[2], ARGV[i])
end
redis.pcall('PUBLISH', KEYS[2], #ARGV - 1)
return {'ok'}
