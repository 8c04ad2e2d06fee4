-- Effects of which nobody knows whether their calls were made, the oldest command first. Locks: none. Index: effect_open.
SELECT c.id, c.domain, c.command_id, c.command_type, e.name, e.key, e.state, e.attempt, e.calls, e.worker, e.begun_at,
       e.ended_at, e.receipt::text, e.note
  FROM commandbus.effect e
  JOIN commandbus.command c ON c.id = e.command
 WHERE e.state IN ('INTENT', 'UNCERTAIN')
   AND (e.command, e.name) > (%(after)s::bigint, %(after_name)s::text)
   AND (%(domain)s::text IS NULL OR c.domain = %(domain)s)
 ORDER BY e.command, e.name
 LIMIT %(limit)s
