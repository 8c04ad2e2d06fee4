-- Takes one permit of a limit that is available and certainly has a permit left, if nobody waits for it. This is the
-- usual case, at a third of the cost of limits/take.sql. Returns a row if it was taken; if not, limits/take.sql finds out
-- why. Permits whose lease has ended count as taken here.
--
-- Everything is decided in the one row, as there. Locks: the limit's row. Indexes: limits_pkey, parked_limit (the ORDER
-- BY makes the planner use it, however many waiters it expects).
UPDATE commandbus.limits l
   SET holders = l.holders || pg_catalog.jsonb_build_object(
           %(token)s::text, pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) + l.lease),
       tat = CASE WHEN l.per_second > 0::float8
                  THEN greatest(l.tat, pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()))
                       + 1::float8 / l.per_second
                  ELSE l.tat END,
       flow = l.flow * pg_catalog.exp(greatest(
           (l.flow_at - pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())) / 60::float8, -50)) + 1::float8,
       flow_at = pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()),
       flow_since = CASE WHEN l.flow_at < pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) - 300::float8
                         THEN pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) ELSE l.flow_since END,
       granted = l.granted + 1
 WHERE l.name = %(name)s AND l.store = 'postgres' AND l.step = 0 AND NOT l.breaker_open AND NOT l.breaker_forced
   AND (l.concurrency IS NULL OR (SELECT pg_catalog.count(*)
                                    FROM pg_catalog.jsonb_object_keys(l.holders)) < l.concurrency)
   AND (l.per_second IS NULL
        OR greatest(0, l.tat - pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())) * l.per_second
           <= l.burst::float8 - 1::float8)
   AND (SELECT true FROM commandbus.parked p WHERE p.limit_name = %(name)s AND p.woken_at IS NULL
         ORDER BY p.since LIMIT 1) IS NULL
RETURNING true
