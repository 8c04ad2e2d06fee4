-- The last steps of a process, the newest first, with what is still known about their commands. The last column says which
-- queue row knows whether a worker holds the command. `longest` (null: any): results and data are
-- left out, and so is an error of more bytes. Locks: none. Indexes: the keys.
SELECT s.number, s.name, s.undoes, s.status, s.domain, s.command_id, s.command_type, s.sent_at, s.finished_at,
       s.deadline_at, CASE WHEN %(longest)s::integer IS NULL THEN s.result::text END,
       CASE WHEN %(longest)s::integer IS NULL OR pg_catalog.octet_length(s.error::text) <= %(longest)s THEN s.error::text
            WHEN s.error IS NOT NULL THEN '{"type": "an error that is too long for this page", "message": "its command has it"}' END,
       c.status::text, CASE WHEN %(longest)s::integer IS NULL THEN c.data::text END, s.kind, s.has_undo,
       CASE WHEN c.status OPERATOR(pg_catalog.=) 'PENDING' THEN c.msg_id END
  FROM commandbus.process_step s LEFT JOIN commandbus.command c ON c.id = s.command
 WHERE s.process = %(process)s
 ORDER BY s.number DESC
 LIMIT %(most)s::bigint
