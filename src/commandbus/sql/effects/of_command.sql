-- The effects of one command, in the order in which they began. Locks: none. Index: the key.
SELECT c.id, c.domain, c.command_id, c.command_type, e.name, e.key, e.state, e.attempt, e.calls, e.worker, e.begun_at,
       e.ended_at, e.receipt::text, e.note
  FROM commandbus.effect e
  JOIN commandbus.command c ON c.id = e.command
 WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s
 ORDER BY e.begun_at, e.name
