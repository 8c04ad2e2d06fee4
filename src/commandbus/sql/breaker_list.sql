-- All breakers for people: of command types, and of limits. What lies outside the window does not count any more.
-- Locks: none. Indexes: parked_reason, parked_limit, the command's key.
SELECT 'type', b.domain || '/' || b.command_type, b.state, b.reason, b.opened_at, b.until, c.command_id,
       (SELECT pg_catalog.count(*) FROM pg_catalog.unnest(b.stuck_at) AS at
         WHERE at > pg_catalog.now() - pg_catalog.make_interval(secs => b.window_seconds)),
       (SELECT pg_catalog.count(*) FROM pg_catalog.unnest(b.failed_at) AS at
         WHERE at > pg_catalog.now() - pg_catalog.make_interval(secs => b.window_seconds)),
       (SELECT pg_catalog.count(*) FROM commandbus.parked p
         WHERE p.reason = 'breaker' AND p.domain = b.domain AND p.command_type = b.command_type),
       b.is_forced
  FROM commandbus.breaker b
  LEFT JOIN commandbus.command c ON c.id = b.probe
UNION ALL
SELECT 'limit', l.name, CASE WHEN NOT l.is_open THEN 'CLOSED' WHEN l.probe IS NULL THEN 'OPEN' ELSE 'HALF_OPEN' END,
       l.open_reason, l.opened_at, l.open_until, CASE WHEN l.is_open THEN l.probe END, 0, l.failures,
       (SELECT pg_catalog.count(*) FROM commandbus.parked p WHERE p.limit_name = l.name AND p.woken_at IS NULL),
       l.is_forced
  FROM commandbus.limits l
 ORDER BY 1 DESC, 2
