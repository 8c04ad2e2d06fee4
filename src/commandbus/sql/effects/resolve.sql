-- A person says how an open effect ended. Writes nothing if a worker holds the command: its attempt may be making the call.
--
-- Locks: the effect's row. Indexes: the keys.
WITH resolved AS (
    UPDATE commandbus.effect e
       SET state = %(state)s, receipt = %(receipt)s::json, note = %(note)s, ended_at = pg_catalog.clock_timestamp()
      FROM commandbus.command c
     WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s
       AND e.command = c.id AND e.name = %(name)s AND e.state IN ('INTENT', 'UNCERTAIN')
       AND NOT EXISTS (SELECT FROM pgmq.{queue} q WHERE q.msg_id = c.msg_id AND q.headers ? 'held_by'::text)
    RETURNING e.command, COALESCE(c.attempt, c.attempt_base) AS attempt_base
)
INSERT INTO commandbus.operator_action (command, action, operator, reason, attempt_base)
SELECT command, 'RESOLVE_EFFECT', %(operator)s, %(action_reason)s, attempt_base FROM resolved
RETURNING command
