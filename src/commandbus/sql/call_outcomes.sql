-- What became of commands, for those who wait in bus.call: the result, or the error of the last attempt, or who
-- canceled it and why. A PENDING command is answered too: one that is not answered does not exist.
--
-- Locks: none. Indexes: the keys of command and attempt, operator_action_command.
SELECT c.id, c.domain, c.command_id, c.status::text, c.result::text, a.error_type, a.error_code, a.error,
       o.operator, o.reason
  FROM commandbus.command c
  LEFT JOIN LATERAL (
       SELECT error_type, error_code, error FROM commandbus.attempt
        WHERE command = c.id AND verdict NOT IN ('GIVEN_BACK', 'PARKED') 
          AND c.status OPERATOR(pg_catalog.<>) ALL ('{PENDING,COMPLETED}')
        ORDER BY number DESC, finished_at DESC LIMIT 1) a ON true
  LEFT JOIN LATERAL (
       SELECT operator, reason FROM commandbus.operator_action
        WHERE command = c.id AND action = 'CANCEL' AND c.status OPERATOR(pg_catalog.=) 'CANCELED'
        ORDER BY id DESC LIMIT 1) o ON true
 WHERE c.id = ANY (%(ids)s::bigint[])
