-- Takes permits of a limit for as many of the tokens as its permits, its rate and its state allow. A limit that is
-- backing off, or whose breaker is open, gives none. After that it gives one, if the callers may be the probe
-- (`probes`). A newly arrived command may not: it must stand in line, where the command with the fewest failed probes is
-- chosen. Newcomers take no permit while somebody waits. Returns which tokens have a permit now; no row if somebody waits,
-- or if there is no such limit.
--
-- Everything is decided in the one row. An UPDATE that waited for another one computes all of this again from the row that
-- the other one wrote (a sub-select over other tables would not). The clock is the server's, and is read at that moment.
-- Locks: the limit's row. Indexes: limits_pkey, parked_limit (the ORDER BY makes the planner use it, however many waiters
-- it expects).
UPDATE commandbus.limits l
   SET (holders, tat, flow, flow_at, flow_since, granted, probe, probe_until) = (
       SELECT live.holders || COALESCE(
                  (SELECT pg_catalog.jsonb_object_agg(token, t.at + COALESCE(%(seconds)s, l.lease))
                     FROM pg_catalog.unnest((%(tokens)s::text[])[:k.k]) AS token), '{}'),
              CASE WHEN l.per_second > 0::float8
                   THEN CASE WHEN k.k > 0 THEN greatest(r.tat, t.at) + k.k::float8 / l.per_second ELSE r.tat END
                   ELSE l.tat END,
              CASE WHEN k.k > 0
                   THEN l.flow * pg_catalog.exp(greatest((l.flow_at - t.at) / 60::float8, -50)) + k.k::float8
                   ELSE l.flow END,
              CASE WHEN k.k > 0 THEN t.at ELSE l.flow_at END,
              CASE WHEN k.k > 0 AND l.flow_at < t.at - 300::float8 THEN t.at ELSE l.flow_since END,
              l.granted + k.k,
              CASE WHEN k.k > 0 AND s.probing THEN (%(tokens)s::text[])[1] ELSE l.probe END,
              CASE WHEN k.k > 0 AND s.probing THEN pg_catalog.to_timestamp(t.at + COALESCE(%(seconds)s, l.lease))
                   ELSE l.probe_until END
         FROM (SELECT pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) AS at OFFSET 0) t
        CROSS JOIN LATERAL (
              SELECT pg_catalog.count(*) FILTER (WHERE value::float8 > t.at) AS n,
                     COALESCE(pg_catalog.jsonb_object_agg(key, value) FILTER (WHERE value::float8 > t.at), '{}')
                         AS holders
                FROM pg_catalog.jsonb_each(l.holders)) live
        CROSS JOIN LATERAL (
              SELECT l.step > 0 OR l.breaker_open AS probing,
                     l.breaker_forced OR COALESCE(l.until > pg_catalog.to_timestamp(t.at), false)
                         OR (l.breaker_open AND COALESCE(l.open_until > pg_catalog.to_timestamp(t.at), false))
                         AS closed,
                     l.probe IS NOT NULL AND COALESCE(l.probe_until > pg_catalog.to_timestamp(t.at), false)
                         AS probed) s
        CROSS JOIN LATERAL (
              SELECT least(l.tat, t.at + l.burst::float8 / l.per_second) AS tat) r
        CROSS JOIN LATERAL (
              SELECT CASE WHEN s.closed OR (s.probing AND (s.probed OR NOT %(probes)s)) THEN 0
                          ELSE greatest(0, least(
                                   CASE WHEN s.probing THEN 1 ELSE pg_catalog.cardinality(%(tokens)s::text[]) END,
                                   COALESCE(l.concurrency, 2147483647) - live.n,
                                   CASE WHEN l.per_second > 0::float8
                                        THEN pg_catalog.floor(
                                                 l.burst::float8 - greatest(0, r.tat - t.at - 1e-6::float8)
                                                                   * l.per_second + 1e-9::float8)::bigint
                                        ELSE 2147483647 END))::integer END AS k
              OFFSET 0) k
       )
 WHERE l.name = %(name)s AND l.store = 'postgres'
   AND NOT (%(newcomers)s AND (
           SELECT true FROM commandbus.parked p WHERE p.limit_name = %(name)s AND p.woken_at IS NULL AND {claimable}
            ORDER BY p.since LIMIT 1) IS NOT NULL)
RETURNING ARRAY(SELECT token FROM pg_catalog.unnest(%(tokens)s::text[]) AS token WHERE l.holders ? token)
