-- The session that holds an attempt's advisory lock. This finds a session behind PgBouncer, where a remembered pid may
-- belong to another session by now. Locks: none.
SELECT l.pid, (extract(epoch FROM a.backend_start) * 1000000::numeric)::bigint
  FROM pg_catalog.pg_locks l
  JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid AND a.backend_start IS NOT NULL
 WHERE locktype = 'advisory' AND objsubid = 1 AND granted
   AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND classid = ((%(key)s::bigint >> 32) & 4294967295)::oid AND objid = (%(key)s::bigint & 4294967295)::oid
