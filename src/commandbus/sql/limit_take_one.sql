-- Takes one place of a limit that stands well, has one for sure, and that nobody waits for: the usual case, at a third of
-- what limit_take.sql costs. Returns a row if it was taken; if not, that statement says why. Places whose lease has ended
-- count as taken here.
--
-- Everything is decided in the one row, as there. Locks: the limit's row. Indexes: limits_pkey, parked_limit (the ORDER BY keeps
-- the planner on it, whatever it believes of how many wait).
UPDATE commandbus.limits l
   SET holders = l.holders || jsonb_build_object(%(token)s::text, date_part('epoch', clock_timestamp()) + l.lease),
       tat = CASE WHEN l.per_second > 0
                  THEN greatest(l.tat, date_part('epoch', clock_timestamp())) + 1 / l.per_second ELSE l.tat END,
       flow = l.flow * exp(greatest((l.flow_at - date_part('epoch', clock_timestamp())) / 60, -50)) + 1,
       flow_at = date_part('epoch', clock_timestamp()),
       flow_since = CASE WHEN l.flow_at < date_part('epoch', clock_timestamp()) - 300
                         THEN date_part('epoch', clock_timestamp()) ELSE l.flow_since END,
       granted = l.granted + 1
 WHERE l.name = %(name)s AND l.backend = 'postgres' AND l.step = 0 AND NOT l.is_open AND NOT l.is_forced
   AND (l.concurrency IS NULL OR (SELECT count(*) FROM jsonb_object_keys(l.holders)) < l.concurrency)
   AND (l.per_second IS NULL
        OR greatest(0, l.tat - date_part('epoch', clock_timestamp())) * l.per_second <= l.burst - 1)
   AND (SELECT true FROM commandbus.parked p WHERE p.limit_name = %(name)s AND p.woken_at IS NULL
         ORDER BY p.since LIMIT 1) IS NULL
RETURNING true
