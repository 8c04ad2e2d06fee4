-- Limits in figures, for metrics: places, how many are in use, who waits (counted up to `most`), what is left of a
-- back-off or an open breaker, and the counters. Of places that are kept in Redis, what its programs said last: the most
-- that each may hold, or what PostgreSQL counts for it while Redis is out of its reach.
-- Locks: none. Indexes: parked_limit; limits, limit_client and limit_mode are small.
SELECT l.name, l.concurrency,
       CASE WHEN l.backend = 'postgres'
            THEN (SELECT count(*) FROM jsonb_each_text(l.holders) WHERE value::float8 > t.at)
            ELSE (SELECT COALESCE(sum((c.held -> l.name ->> 'most')::integer), 0) FROM commandbus.limit_client c
                   WHERE c.lost_at IS NULL AND c.beat_at > clock_timestamp() - make_interval(secs => %(alive)s + l.lease))
                 + (SELECT count(DISTINCT k.key)
                      FROM commandbus.limit_client c, jsonb_each_text(c.held -> l.name -> 'tokens') k
                     WHERE c.lost_at IS NOT NULL AND k.value::float8 > t.at) END,
       (SELECT count(*) FROM (SELECT FROM commandbus.parked p
                               WHERE p.limit_name = l.name AND p.woken_at IS NULL AND p.domain <> '' LIMIT %(most)s) x),
       (SELECT count(*) FROM (SELECT FROM commandbus.parked p
                               WHERE p.limit_name = l.name AND p.woken_at IS NULL AND p.domain = '' LIMIT %(most)s) x),
       greatest(0, extract(epoch FROM greatest(l.until, CASE WHEN l.is_open THEN l.open_until END))::float8 - t.at),
       l.is_open OR l.is_forced,
       l.backend = 'redis' AND (
           EXISTS (SELECT FROM commandbus.limit_mode m WHERE m.mode = 'degraded')
           OR EXISTS (SELECT FROM commandbus.limit_client c
                       WHERE c.lost_at IS NOT NULL AND c.beat_at > clock_timestamp() - make_interval(secs => %(alive)s))),
       l.granted, l.rate_limited, l.waits, l.waited_seconds
  FROM commandbus.limits l,
       LATERAL (SELECT extract(epoch FROM clock_timestamp())::float8 AS at) t
 ORDER BY l.name
