-- How many wait for limits (commands, and callers inside programs), and for how long the first of them has waited.
-- Locks: none. Index: parked_limit.
SELECT limit_name, pg_catalog.count(*) FILTER (WHERE domain <> ''), pg_catalog.count(*) FILTER (WHERE domain = ''),
       extract(epoch FROM pg_catalog.now() - pg_catalog.min(parked_at))::float8
  FROM commandbus.parked
 WHERE limit_name IS NOT NULL AND woken_at IS NULL AND (%(name)s::text IS NULL OR limit_name = %(name)s)
 GROUP BY limit_name
