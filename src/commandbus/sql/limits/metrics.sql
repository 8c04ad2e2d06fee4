-- The metrics of limits: permits, how many are in use, how many wait (counted up to `most`), how long a back-off or an open
-- breaker still lasts, and the counters. For permits in Redis, it uses the last reports of the programs: the most that each
-- may hold, or what PostgreSQL counts for a program that cannot reach Redis.
-- Locks: none. Indexes: parked_limit; limits, limit_client and limit_mode are small.
SELECT l.name, l.concurrency,
       CASE WHEN l.store = 'postgres'
            THEN (SELECT pg_catalog.count(*) FROM pg_catalog.jsonb_each_text(l.holders) WHERE value::float8 > t.at)
            ELSE (SELECT COALESCE(pg_catalog.sum((c.held -> l.name ->> 'most'::text)::integer), 0)
                    FROM commandbus.limit_client c
                   WHERE c.lost_at IS NULL
                     AND c.beat_at > pg_catalog.clock_timestamp()
                                     - pg_catalog.make_interval(secs => %(alive)s::float8 + l.lease))
                 + (SELECT pg_catalog.count(DISTINCT k.key)
                      FROM commandbus.limit_client c,
                           pg_catalog.jsonb_each_text(c.held -> l.name -> 'tokens'::text) k
                     WHERE c.lost_at IS NOT NULL AND k.value::float8 > t.at) END,
       (SELECT pg_catalog.count(*) FROM (SELECT FROM commandbus.parked p
                               WHERE p.limit_name = l.name AND p.woken_at IS NULL AND p.domain <> '' LIMIT %(most)s) x),
       (SELECT pg_catalog.count(*) FROM (SELECT FROM commandbus.parked p
                               WHERE p.limit_name = l.name AND p.woken_at IS NULL AND p.domain = '' LIMIT %(most)s) x),
       greatest(0, extract(epoch FROM greatest(l.until, CASE WHEN l.breaker_open THEN l.open_until END))::float8 - t.at),
       l.breaker_open OR l.breaker_forced,
       l.store = 'redis' AND (
           EXISTS (SELECT FROM commandbus.limit_mode m WHERE m.mode = 'degraded')
           OR EXISTS (SELECT FROM commandbus.limit_client c
                       WHERE c.lost_at IS NOT NULL
                         AND c.beat_at > pg_catalog.clock_timestamp()
                                         - pg_catalog.make_interval(secs => %(alive)s))),
       l.granted, l.rate_limited, l.waits, l.waited_seconds
  FROM commandbus.limits l,
       LATERAL (SELECT extract(epoch FROM pg_catalog.clock_timestamp())::float8 AS at) t
 ORDER BY l.name
