-- The rows of limits, with their present situation: who holds a permit and for how long, how many permits per second were
-- given recently (while the limit is blocked: before that), whether anybody waits, when a call last succeeded, and for how long no call has succeeded while somebody
-- waited. name NULL: all limits.
-- Locks: none, or (with `locking`) the row, for a caller that wants to change it. Indexes: limits_pkey, parked_limit.
SELECT l.name, l.environment, l.store, l.step, pg_catalog.date_part('epoch', l.until), l.reason, l.failures,
       l.breaker_open, l.breaker_forced, pg_catalog.date_part('epoch', l.opened_at),
       pg_catalog.date_part('epoch', l.open_until), l.open_reason, l.probe,
       pg_catalog.date_part('epoch', l.probe_until), l.blamed, l.vain,
       pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()),
       l.tat,
       CASE WHEN l.flow_at > 0::float8
            THEN l.flow * pg_catalog.exp(greatest((l.flow_at - f.counted_at) / 60::float8, -50)) / 60::float8
                 / (1::float8 - pg_catalog.exp(-least(greatest(f.counted_at - l.flow_since, 1), 600) / 60::float8))
            END,
       COALESCE((SELECT pg_catalog.jsonb_object_agg(
                            key, value::float8 - pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()))
                        FILTER (WHERE value::float8 > pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()))
                   FROM pg_catalog.jsonb_each(l.holders)), '{}'),
       l.granted, l.rate_limited, l.waits, l.waited_seconds, l.declared, l.override, l.changed_at,
       (SELECT true FROM commandbus.parked p WHERE p.limit_name = l.name AND p.woken_at IS NULL AND {claimable}
         ORDER BY p.since LIMIT 1) IS NOT NULL,
       pg_catalog.date_part('epoch', l.good_at),
       extract(epoch FROM pg_catalog.clock_timestamp() - greatest(l.good_at, l.tended_since))::float8
  FROM commandbus.limits l
 CROSS JOIN LATERAL (
       SELECT CASE WHEN l.breaker_forced OR l.until > pg_catalog.clock_timestamp()
                        OR (l.breaker_open AND l.open_until > pg_catalog.clock_timestamp())
                   THEN l.flow_at
                   ELSE pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) END AS counted_at) f
 WHERE %(name)s::text IS NULL OR l.name = %(name)s
 ORDER BY l.name
{locking}
