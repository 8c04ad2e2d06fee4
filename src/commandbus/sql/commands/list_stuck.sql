-- Attempts that had to be stopped by the ladder, newest first. Locks: none.
-- Index: attempt_stopped, backwards from now or from where the last page ended; then the command's key.
SELECT a.command, c.domain, c.command_id, c.command_type, a.number, a.verdict, a.rung, a.error_type, a.error_code,
       a.error, a.worker, a.started_at, a.finished_at, a.duration_ms, a.autopsy::text
  FROM commandbus.attempt a
  JOIN commandbus.command c ON c.id = a.command
 WHERE a.rung IS NOT NULL
   AND (%(since)s::timestamptz IS NULL OR a.finished_at >= %(since)s)
   AND (%(domain)s::text IS NULL OR c.domain = %(domain)s)
   AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s)
   AND (%(everything)s::boolean OR a.verdict <> 'WAIVED' AND (a.verdict <> 'CANCELED' OR a.rung <> 'cancel'))
   {after}
   AND a.finished_at <= COALESCE(%(before)s::timestamptz, 'infinity'::timestamptz)
   AND (%(before)s::timestamptz IS NULL OR (a.finished_at, a.command, a.number, a.verdict)
        < (%(before)s::timestamptz, %(before_command)s::bigint, %(before_number)s::integer, %(before_verdict)s::text))
 ORDER BY a.finished_at DESC, a.command DESC, a.number DESC, a.verdict DESC
 LIMIT %(limit)s
