-- Cancels many members of a batch at once, like commands/cancel.sql. Members that no worker runs become CANCELED; running
-- members are asked to stop. Returns what a reply needs, and what was done (ASKED: somebody had asked before). Members that
-- are not PENDING, or were moved meanwhile, are not returned.
--
-- Locks: command rows, then queue rows. It waits for neither, so this order can block nobody: a member of which another
-- transaction has locked one of both is not returned, and the caller comes back to it. Indexes: the command's key, the
-- queue's key. The caller's next statement deletes the rows of `parked`.
WITH target AS MATERIALIZED (
    SELECT id, msg_id, attempt_base FROM commandbus.command
     WHERE id = ANY (%(ids)s::bigint[]) AND status OPERATOR(pg_catalog.=) 'PENDING'
       FOR NO KEY UPDATE SKIP LOCKED
), found AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct, COALESCE(q.headers ? 'held_by'::text, false) AS is_held,
           COALESCE(q.headers ? 'cancel'::text, false) AS is_asked
      FROM pgmq.{queue} q
     WHERE q.msg_id = ANY (ARRAY(SELECT msg_id FROM target))
     ORDER BY q.msg_id
       FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pgmq.{queue} WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM found WHERE NOT is_held))
    RETURNING msg_id, read_ct, (message ->> 'command'::text)::bigint AS command
), moved AS (
    UPDATE commandbus.command c
       SET status = 'CANCELED', finished_at = pg_catalog.now(), attempt_base = c.attempt_base + g.read_ct
      FROM gone g
     WHERE c.id = g.command
    RETURNING c.id, c.command_id, c.command_type, c.correlation_id, c.reply_to, c.attempt_base, c.batch, c.process,
              c.step, g.msg_id
), asked AS (
    UPDATE pgmq.{queue}
       SET headers = headers || pg_catalog.jsonb_build_object('cancel', pg_catalog.jsonb_build_object(
               'by', %(operator)s::text, 'reason', %(reason)s::text, 'at', pg_catalog.now()))
     WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM found WHERE is_held AND NOT is_asked))
    RETURNING msg_id, read_ct
), noted AS (
    INSERT INTO commandbus.operator_action (command, action, operator, reason, attempt_base, attempt)
    SELECT id, 'CANCEL', %(operator)s, %(reason)s, attempt_base, NULL FROM moved
    UNION ALL
    SELECT t.id, 'CANCEL', %(operator)s, %(reason)s, t.attempt_base, t.attempt_base + a.read_ct
      FROM asked a JOIN target t USING (msg_id)
), told AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, 'cancel ' || msg_id::text) FROM asked
)
SELECT id, command_id, command_type, correlation_id, reply_to, batch, process, step, 'CANCELED', msg_id FROM moved
UNION ALL
SELECT t.id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, CASE WHEN f.is_asked THEN 'ASKED' ELSE 'REQUESTED' END, f.msg_id
  FROM found f JOIN target t USING (msg_id)
 WHERE f.is_held AND (SELECT pg_catalog.count(*) FROM told) >= 0
 ORDER BY 1
