-- Ends the server's side of a dead worker's connections: a statement that it left running would still land.
-- Returns each backend and whether it was told to end; NULL for one of another role, which we may not.
--
-- Locks: none. By its name on every connection (`commandbus <worker id> <part>`), and by process id for those whose
-- handler has changed that name.
SELECT pid, CASE WHEN usename = current_user THEN pg_terminate_backend(pid) END
  FROM pg_stat_activity
 WHERE (starts_with(application_name, %(prefix)s) OR pid = ANY (%(pids)s::integer[]))
   AND backend_type = 'client backend'
   AND datname = current_database()
   AND pid <> pg_backend_pid()
