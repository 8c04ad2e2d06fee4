-- Releases permits. A good answer ends a series of bad answers. Its time is written at once if the row is written anyway or
-- if it is the first good answer since the breaker opened, otherwise about once a second. Returns whether somebody waits,
-- and which token is the probe.
-- Locks: the limit's row, if anything changes in it. Indexes: limits_pkey, parked_limit (the ORDER BY makes the planner use
-- it, however many waiters it expects).
WITH given AS (
    UPDATE commandbus.limits l
       SET holders = l.holders - %(tokens)s::text[],
           failures = CASE WHEN %(good)s AND l.step = 0 AND NOT l.breaker_open THEN 0 ELSE l.failures END,
           blamed = CASE WHEN %(good)s AND l.step = 0 AND NOT l.breaker_open THEN '{}' ELSE l.blamed END,
           good_at = CASE WHEN %(good)s THEN pg_catalog.clock_timestamp() ELSE l.good_at END
     WHERE l.name = %(name)s
       AND (l.holders ?| %(tokens)s::text[]
            OR (%(good)s AND l.failures > 0 AND l.step = 0 AND NOT l.breaker_open)
            OR (%(good)s AND (l.good_at IS NULL OR (l.breaker_open AND l.good_at < l.opened_at)
                              OR l.good_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(
                                     secs => least(1::float8, l.max_wait / 10::float8)))))
)
SELECT (SELECT true FROM commandbus.parked p
         WHERE p.limit_name = %(name)s AND p.woken_at IS NULL AND {claimable}
         ORDER BY p.since LIMIT 1) IS NOT NULL,
       (SELECT probe FROM commandbus.limits WHERE name = %(name)s)
