-- Cancels a command. If no worker runs it, its queue row is deleted and the command is CANCELED. If a worker runs it, the
-- request is written into the row's headers and the domain's workers are notified; an earlier request stays. Returns what a
-- reply needs, and which of the two was done; no row if there is nothing to cancel.
--
-- Locks: the queue row (waits for a claim or a settlement that is not committed yet, then sees its result), then the
-- command row. Both writes go by key, because the transaction that we waited for has moved the row. Indexes:
-- command_domain_command_id_key, the queue's key. The caller's next statement deletes the row of `parked`: if we waited for
-- a transaction that parked the command, that row is not in our snapshot.
WITH target AS MATERIALIZED (
    SELECT id, msg_id, attempt_base FROM commandbus.command
     WHERE domain = %(domain)s AND command_id = %(command_id)s AND status OPERATOR(pg_catalog.=) 'PENDING'
), found AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct, COALESCE(q.headers ? 'held_by'::text, false) AS is_held,
           COALESCE(q.headers ? 'cancel'::text, false) AS is_asked
      FROM pgmq.{queue} q
     WHERE q.msg_id = (SELECT msg_id FROM target)
       FOR UPDATE
), gone AS (
    DELETE FROM pgmq.{queue} WHERE msg_id IN (SELECT msg_id FROM found WHERE NOT is_held) RETURNING read_ct
), moved AS (
    UPDATE commandbus.command c
       SET status = 'CANCELED', finished_at = pg_catalog.now(),
           attempt_base = c.attempt_base + (SELECT read_ct FROM gone)
     WHERE c.id = (SELECT id FROM target) AND EXISTS (SELECT FROM gone)
    RETURNING c.id, c.command_id, c.command_type, c.correlation_id, c.reply_to, c.attempt_base,
              c.batch, c.process, c.step
), asked AS (
    UPDATE pgmq.{queue}
       SET headers = headers || pg_catalog.jsonb_build_object('cancel', pg_catalog.jsonb_build_object(
               'by', %(operator)s::text, 'reason', %(reason)s::text, 'at', pg_catalog.now()))
     WHERE msg_id IN (SELECT msg_id FROM found WHERE is_held AND NOT is_asked)
    RETURNING read_ct
), noted AS (
    INSERT INTO commandbus.operator_action (command, action, operator, reason, attempt_base, attempt)
    SELECT id, 'CANCEL', %(operator)s, %(reason)s, attempt_base, NULL FROM moved
    UNION ALL
    SELECT t.id, 'CANCEL', %(operator)s, %(reason)s, t.attempt_base, t.attempt_base + a.read_ct
      FROM asked a, target t
), told AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, 'cancel ' || msg_id::text) FROM found WHERE is_held
)
SELECT id, command_id, command_type, correlation_id, reply_to, batch, process, step, 'CANCELED', (SELECT msg_id FROM found)
  FROM moved
UNION ALL
SELECT t.id, %(command_id)s, NULL, NULL, NULL, NULL, NULL, NULL, 'REQUESTED', t.msg_id
  FROM target t, told
