-- The oldest signals of a name that no step of the process has taken, and that nobody ended before the process handled
-- them. A move that takes many reads them in portions, because each reading looks at all signals of the process.
--
-- The list of what was taken is read once (NOT IN), not once for every signal.
-- Locks: none; the move that takes the signal names the version that was read. Indexes: command_process, process_step's key.
SELECT c.id, c.command_id, (c.data -> 'data'::text)::text
  FROM commandbus.command c
 WHERE c.process = %(process)s AND c.step = 0 AND c.data ->> 'event'::text = 'signal' AND c.data ->> 'name'::text = %(name)s
   AND c.status OPERATOR(pg_catalog.<>) 'CANCELED' AND c.command_id <> ALL (%(taken)s::text[])
   AND c.id NOT IN (SELECT s.command FROM commandbus.process_step s
                     WHERE s.process = %(process)s AND s.kind = 'signal' AND s.command IS NOT NULL)
   AND NOT EXISTS (SELECT FROM commandbus.operator_action a WHERE a.command = c.id AND a.action = 'COMPLETE')
 ORDER BY c.id
 LIMIT %(most)s
