-- What a session is doing, and which sessions block it. The session is named by its process id and its start, because the
-- id alone may belong to another session by now. The server hides the text and the start of other roles' sessions. Locks:
-- none.
SELECT a.pid, a.state, pg_catalog.left(a.query, 4000), a.wait_event_type, a.wait_event,
       extract(epoch FROM pg_catalog.now() - a.xact_start)::float8,
       (SELECT pg_catalog.json_agg(pg_catalog.json_build_object(
                   'pid', b.pid, 'query', pg_catalog.left(b.query, 1000), 'state', b.state,
                   'application_name', b.application_name))::text
          FROM pg_catalog.pg_stat_activity b
         WHERE b.pid = ANY (pg_catalog.pg_blocking_pids(a.pid)))
  FROM pg_catalog.pg_stat_activity a
 WHERE a.pid = %(pid)s
   AND COALESCE((extract(epoch FROM a.backend_start) * 1000000::numeric)::bigint = %(started)s, true)
