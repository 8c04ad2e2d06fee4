-- What ran in these workers when they died, among the attempts that were stopped last. Locks: none. Indexes: attempt_stopped,
-- backwards from now, so many entries; then the keys of commands.
SELECT a.worker, c.domain, c.command_type, c.command_id, a.number, a.verdict, a.error
  FROM (SELECT * FROM commandbus.attempt
         WHERE rung IS NOT NULL AND finished_at >= %(since)s::timestamptz
         ORDER BY finished_at DESC LIMIT %(most)s) a
  JOIN commandbus.worker w ON w.id = a.worker AND w.death IS NOT NULL AND a.finished_at >= w.died_at
  JOIN commandbus.command c ON c.id = a.command
 WHERE a.worker = ANY (%(workers)s::text[])
 ORDER BY a.finished_at, a.command, a.number
