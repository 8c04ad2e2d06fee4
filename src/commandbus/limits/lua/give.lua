-- Gives back the places of these tokens, and of no others. ARGV: …, token, …
for i = 3, #ARGV do
    redis.call('ZREM', KEYS[2], ARGV[i])
end
return {'ok'}
