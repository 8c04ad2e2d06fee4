-- Renews leases, and answers which tokens hold no place. One that ran out but was not given away yet is renewed: nobody
-- has taken its place. With `register`, a token that Redis does not know is put in, because its holder had it before Redis
-- lost its data: always before the epoch opens to newcomers, and after that only where there is room.
--
-- ARGV: …, lease in microseconds, register (1 or 0), concurrency (-1: any), token, …
local ends, register, concurrency = whole(now + tonumber(ARGV[3])), ARGV[4] == '1', tonumber(ARGV[5])
local answer = {'ok'}
for i = 6, #ARGV do
    local held = redis.call('ZSCORE', KEYS[2], ARGV[i])
    if held then
        if tonumber(held) < tonumber(ends) then
            redis.call('ZADD', KEYS[2], ends, ARGV[i])
        end
    else
        local is_in = register
        if is_in and now >= opens and concurrency >= 0 then
            redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(now))
            is_in = redis.call('ZCARD', KEYS[2]) < concurrency
        end
        if is_in then
            redis.call('ZADD', KEYS[2], ends, ARGV[i])
        else
            answer[#answer + 1] = ARGV[i]
        end
    end
end
keep_places()
return answer
