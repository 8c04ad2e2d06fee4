-- The oldest transaction that holds a lock on one of our tables, or migrates: a migration waits for it. Locks: none.
SELECT a.pid, a.application_name, extract(epoch FROM pg_catalog.clock_timestamp() - a.xact_start)::float8
  FROM pg_catalog.pg_locks l
  LEFT JOIN pg_catalog.pg_class c ON c.oid = l.relation
  LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.granted
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
   AND ((l.locktype = 'relation' AND n.nspname IN ('commandbus', 'pgmq'))
        OR (l.locktype = 'advisory' AND l.objsubid = 1
            AND ((l.classid::bigint << 32) | l.objid::bigint) = %(key)s::bigint))
   AND a.pid <> pg_catalog.pg_backend_pid() AND a.xact_start IS NOT NULL
 ORDER BY a.xact_start
 LIMIT 1
