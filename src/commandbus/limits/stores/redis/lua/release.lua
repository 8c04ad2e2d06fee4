-- Releases the permits of these tokens. It works even if the caller may no longer ask Redis, because it only frees what
-- was taken. Waiting programs are notified on the channel with the name of the permits' key. Without the right to publish
-- there, they look later.
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
