-- Changes the priority of a command that waits or runs: its row, and the band of its message's vt (ADR 27). It keeps the moment
-- at which it is due, but one that is due already goes behind what is due in its new band: a claim's cursor has passed
-- older moments. Returns the former priority and the msg_id; no row if the command has ended or is in the troubleshooting
-- queue.
--
-- Locks: the queue row (waits for a claim or a settlement that is not committed yet, then sees its result), then the
-- command row. Both writes go by key, because the transaction that we waited for has moved the row. Indexes:
-- command_domain_command_id_key, the queue's key. The caller's next statement moves the command in a limit's line.
WITH target AS MATERIALIZED (
    SELECT id, msg_id, attempt_base, priority FROM commandbus.command
     WHERE domain = %(domain)s AND command_id = %(command_id)s AND status OPERATOR(pg_catalog.=) 'PENDING'
), found AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct, COALESCE(q.headers ? 'held_by'::text, false) AS is_held
      FROM pgmq.{queue} q
     WHERE q.msg_id = (SELECT msg_id FROM target)
       FOR UPDATE
), moved AS (
    UPDATE pgmq.{queue}
       SET vt = greatest({due_at}, pg_catalog.clock_timestamp()) + {shift_for %(priority)s::smallint}
     WHERE msg_id IN (SELECT msg_id FROM found)
    RETURNING vt
), changed AS (
    UPDATE commandbus.command SET priority = %(priority)s::smallint
     WHERE id = (SELECT id FROM target) AND EXISTS (SELECT FROM found)
), noted AS (
    INSERT INTO commandbus.operator_action (command, action, operator, reason, attempt_base, attempt, priority)
    SELECT t.id, 'PRIORITY', %(operator)s, %(reason)s, t.attempt_base + f.read_ct,
           CASE WHEN f.is_held THEN t.attempt_base + f.read_ct END, %(name)s
      FROM target t, found f
), woken AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM vt)::text) FROM moved
     WHERE EXISTS (SELECT FROM commandbus.waiting WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
)
SELECT t.priority, f.msg_id, (SELECT pg_catalog.count(*) FROM woken) FROM target t, found f
