-- Connections to this database by role and program, and how many of them hide from this role what they do.
-- Locks: none. A session that hides what it does hides its kind, too; those without a role are the server's own.
SELECT COALESCE(a.usename::text, ''), COALESCE(a.application_name, ''), pg_catalog.count(*),
       pg_catalog.count(*) FILTER (WHERE a.state = 'active'),
       pg_catalog.count(*) FILTER (WHERE a.state IN ('idle in transaction', 'idle in transaction (aborted)')),
       pg_catalog.count(*) FILTER (WHERE a.query = '<insufficient privilege>')
  FROM pg_catalog.pg_stat_activity a
 WHERE a.datname = pg_catalog.current_database() AND (a.backend_type = 'client backend' OR (a.backend_type IS NULL AND a.usename IS NOT NULL))
 GROUP BY 1, 2
 ORDER BY 3 DESC, 1, 2
 LIMIT %(most)s
