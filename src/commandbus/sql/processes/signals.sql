-- The signals that a process got, and the number of the step that took each. Locks: none. Indexes: command_process,
-- process_step's key.
SELECT c.data ->> 'signal_id'::text, c.data ->> 'name'::text, (c.data -> 'data'::text)::text, c.created_at, c.data ->> 'by'::text,
       c.data ->> 'reason'::text,
       s.number, c.status::text, c.command_id
  FROM commandbus.command c
  LEFT JOIN commandbus.process_step s ON s.process = %(process)s AND s.command = c.id
 WHERE c.process = %(process)s AND c.step = 0 AND c.data ->> 'event'::text = 'signal'
 ORDER BY c.id
