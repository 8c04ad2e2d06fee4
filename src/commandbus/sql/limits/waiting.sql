-- How many wait for limits (commands, and callers inside programs), of the first %(most)s in each line, and for how long the first of
-- them has waited. Locks: none. Index: parked_limit, in its order.
SELECT l.name, line.commands, line.callers, line.seconds
  FROM commandbus.limits l
 CROSS JOIN LATERAL (
       SELECT pg_catalog.count(*) FILTER (WHERE x.domain <> '') AS commands, pg_catalog.count(*) FILTER (WHERE x.domain = '') AS callers,
              extract(epoch FROM pg_catalog.now() - pg_catalog.min(x.parked_at))::float8 AS seconds
         FROM (SELECT p.domain, p.parked_at
                 FROM commandbus.parked p
                WHERE p.limit_name = l.name AND p.woken_at IS NULL
                ORDER BY p.limit_name, p.since, p.command, p.seq
                LIMIT %(most)s) x) line
 WHERE %(name)s::text IS NULL OR l.name = %(name)s
