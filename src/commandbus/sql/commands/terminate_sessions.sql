-- Ends the server's side of a dead worker's connections. Otherwise a statement that it left running could still commit.
-- Returns each session and whether it was told to end; NULL for a session of another role, which we may not end.
--
-- Locks: none. It finds sessions by the name that is on every connection (`commandbus <worker id> <part>`). Sessions that
-- are known to be the worker's own are found by process id and start: a handler has changed their name, or has opened them
-- itself, perhaps to another database. A process id alone may belong to another session by now.
SELECT pid, CASE WHEN usename = current_user THEN pg_catalog.pg_terminate_backend(pid) END
  FROM pg_catalog.pg_stat_activity
 WHERE (backend_type = 'client backend' OR backend_type IS NULL)  -- a session of another role hides its kind
   AND pid <> pg_catalog.pg_backend_pid()
   AND (pg_catalog.starts_with(application_name, %(prefix)s) AND datname = pg_catalog.current_database()
        OR EXISTS (SELECT FROM unnest(%(pids)s::integer[], %(started)s::bigint[]) AS known (pid, started)
                    WHERE known.pid = pg_stat_activity.pid
                      AND known.started = (extract(epoch FROM backend_start) * 1000000::numeric)::bigint))
