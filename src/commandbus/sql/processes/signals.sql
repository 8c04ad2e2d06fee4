-- The last signals that a process got, the newest first, and the number of the step that took each. `longest`: as in trail.sql. Locks: none. Indexes: command_process,
-- process_step's key.
SELECT c.data ->> 'signal_id'::text, c.data ->> 'name'::text, 
       CASE WHEN %(longest)s::integer IS NULL OR pg_catalog.octet_length(c.data::text) <= %(longest)s
            THEN (c.data -> 'data'::text)::text END, c.created_at, c.data ->> 'by'::text,
       c.data ->> 'reason'::text,
       s.number, c.status::text, c.command_id, CASE WHEN c.status OPERATOR(pg_catalog.=) 'PENDING' THEN c.msg_id END
  FROM commandbus.command c
  LEFT JOIN commandbus.process_step s ON s.process = %(process)s AND s.command = c.id
 WHERE c.process = %(process)s AND c.step = 0 AND c.data ->> 'event'::text = 'signal'
 ORDER BY c.id DESC
 LIMIT %(most)s::bigint
