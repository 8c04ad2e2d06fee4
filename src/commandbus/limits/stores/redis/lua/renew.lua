-- Renews leases, and returns the tokens that hold no permit. A lease that has run out is renewed if nobody has taken its
-- permit. With `register`, a token that Redis does not know is added, because its holder had it before Redis lost its
-- data: always before the epoch opens to newcomers, and after that only if there is room.
--
-- ARGV: …, when the epoch opens (microseconds), register (1 or 0), concurrency (-1: any), lease in microseconds, token, …
local opens, register, concurrency, lease = tonumber(ARGV[3]), ARGV[4] == '1', tonumber(ARGV[5]), tonumber(ARGV[6])
local ends, answer = whole(now + lease), {'ok'}
for i = 7, #ARGV do
    local held = redis.call('ZSCORE', KEYS[2], ARGV[i])
    local is_in = held or register
    if not held and register and now >= opens and concurrency >= 0 then
        redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(now))
        is_in = redis.call('ZCARD', KEYS[2]) < concurrency
    end
    if not is_in then
        answer[#answer + 1] = ARGV[i]
    elseif not held or tonumber(held) < now + lease then
        redis.call('ZADD', KEYS[2], ends, ARGV[i])
        if is_semaphore(ARGV[i]) then
            note_semaphores(ends, lease)
        end
    end
end
keep_places(lease)
return answer
