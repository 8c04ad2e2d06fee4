-- Every step of a process, with what is still known about its command. Locks: none. Indexes: the keys.
SELECT s.number, s.name, s.undoes, s.status, s.domain, s.command_id, s.command_type, s.sent_at, s.finished_at,
       s.deadline_at, s.result::text, s.error::text, c.status::text, c.data::text, s.kind
  FROM commandbus.process_step s LEFT JOIN commandbus.command c ON c.id = s.command
 WHERE s.process = %(process)s
 ORDER BY s.number
