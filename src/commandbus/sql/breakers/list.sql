-- All breakers, of command types and of limits, for people. Only attempts within the window count. `others` are the
-- attempts of the type that ended in another way since the first bad one began, by the workers' last counts. If a worker
-- reports more than it remembers, its attempts count as 1000.
-- Locks: none. Indexes: parked_reason, parked_limit, the command's key. `worker` has a row for each worker of a day.
SELECT 'type', b.domain || '/' || b.command_type, b.state,
       CASE WHEN b.state <> 'CLOSED' OR pg_catalog.count(r.at) > 0 THEN b.reason END, b.opened_at, b.until, c.command_id,
       pg_catalog.count(r.at) FILTER (WHERE r.is_stuck), pg_catalog.count(r.at) FILTER (WHERE NOT r.is_stuck),
       (SELECT COALESCE(pg_catalog.sum(COALESCE((w.counts -> (b.domain || '/' || b.command_type) -> 'others'::text
                                                          ->> 0)::bigint, 1000)), 0)::bigint
          FROM commandbus.worker w
         WHERE w.heartbeat_at >= pg_catalog.to_timestamp(pg_catalog.min(r.began))
           AND w.counts ? (b.domain || '/' || b.command_type)),
       (SELECT pg_catalog.count(*)
          FROM (SELECT FROM commandbus.parked p
                 WHERE p.reason = 'breaker' AND p.domain = b.domain AND p.command_type = b.command_type
                 LIMIT %(most)s) x),
       b.is_forced
  FROM commandbus.breaker b
  LEFT JOIN commandbus.command c ON c.id = b.probe
  LEFT JOIN LATERAL (
       SELECT (x ->> 1)::boolean AS is_stuck, (x ->> 2)::float8 AS began, (x ->> 3)::float8 AS at
         FROM pg_catalog.jsonb_array_elements(b.recent) x
        WHERE (x ->> 3)::float8 > extract(epoch FROM pg_catalog.now())::float8 - b.window_seconds) r ON true
 GROUP BY b.domain, b.command_type, c.command_id
UNION ALL
SELECT 'limit', l.name, CASE WHEN NOT l.breaker_open THEN 'CLOSED' WHEN l.probe IS NULL THEN 'OPEN' ELSE 'HALF_OPEN' END,
       l.open_reason, l.opened_at, l.open_until, CASE WHEN l.breaker_open THEN l.probe END, 0, l.failures, 0,
       (SELECT pg_catalog.count(*)
          FROM (SELECT FROM commandbus.parked p WHERE p.limit_name = l.name AND p.woken_at IS NULL
                 ORDER BY p.limit_name, p.since LIMIT %(most)s) x),
       l.breaker_forced
  FROM commandbus.limits l
 ORDER BY 1 DESC, 2
