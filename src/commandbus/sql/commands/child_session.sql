-- Can this session be the one that a handler's child process names as its own? It must have our role and database, be
-- younger than the attempt, and not belong to commandbus. (The handler may have renamed it.) Locks: none.
SELECT pid
  FROM pg_catalog.pg_stat_activity
 WHERE pid = %(pid)s
   AND (extract(epoch FROM backend_start) * 1000000::numeric)::bigint = %(started)s
   AND backend_type = 'client backend'
   AND usename = current_user
   AND datname = pg_catalog.current_database()
   AND (application_name = %(name)s OR NOT pg_catalog.starts_with(application_name, 'commandbus '))
   AND pg_catalog.clock_timestamp() - backend_start <= pg_catalog.make_interval(secs => %(seconds)s::float8)
