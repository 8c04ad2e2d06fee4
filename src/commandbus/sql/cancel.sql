-- Cancels a command that nobody is running: its queue row goes, the command is CANCELED.
--
-- Locks: the queue row (waits for a claim in flight, then sees that it is held and does nothing), then the
-- command row. Indexes: command_domain_command_id_key, the queue's key.
WITH target AS MATERIALIZED (
    SELECT id, msg_id FROM commandbus.command
     WHERE domain = %(domain)s AND command_id = %(command_id)s AND status = 'PENDING'
), free AS MATERIALIZED (
    SELECT q.msg_id
      FROM pgmq.{queue} q
     WHERE q.msg_id = (SELECT msg_id FROM target) AND NOT COALESCE(q.headers ? 'held_by', false)
       FOR UPDATE
), gone AS (
    DELETE FROM pgmq.{queue} WHERE msg_id IN (SELECT msg_id FROM free) RETURNING read_ct
), unparked AS (
    DELETE FROM commandbus.parked WHERE domain = %(domain)s AND msg_id IN (SELECT msg_id FROM free)
), moved AS (
    UPDATE commandbus.command c
       SET status = 'CANCELED', finished_at = now(), attempt_base = c.attempt_base + (SELECT read_ct FROM gone)
     WHERE c.id = (SELECT id FROM target) AND EXISTS (SELECT FROM gone)
    RETURNING c.id, c.command_id, c.command_type, c.correlation_id, c.reply_to, c.attempt_base
), noted AS (
    INSERT INTO commandbus.operator_action (command, action, operator, reason, attempt_base)
    SELECT id, 'CANCEL', %(operator)s, %(reason)s, attempt_base FROM moved
)
SELECT id, command_id, command_type, correlation_id, reply_to FROM moved
