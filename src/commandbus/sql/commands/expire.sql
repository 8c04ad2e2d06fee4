-- Ends commands that have not started in time and that no worker runs: CANCELED, with an attempt row that says EXPIRED.
-- Returns what a reply needs. For a PENDING command that a worker holds or that is locked, returns only the id: ask again.
--
-- Locks: queue rows, then their command rows, those that nobody else has locked. Indexes: the command's key, the
-- queue's key. The caller's next statement deletes the rows of `parked`.
WITH target AS MATERIALIZED (
    SELECT id, msg_id FROM commandbus.command
     WHERE id = ANY (%(ids)s::bigint[]) AND status OPERATOR(pg_catalog.=) 'PENDING' AND expires_at <= pg_catalog.now()
), free AS MATERIALIZED (
    SELECT q.msg_id
      FROM target t
     CROSS JOIN LATERAL (
           SELECT q.msg_id FROM pgmq.{queue} q
            WHERE q.msg_id = t.msg_id AND NOT COALESCE(q.headers ? 'held_by'::text, false)
              FOR UPDATE SKIP LOCKED) q
     CROSS JOIN LATERAL (
           SELECT c.id FROM commandbus.command c WHERE c.id = t.id
              FOR NO KEY UPDATE SKIP LOCKED) c
), gone AS (
    DELETE FROM pgmq.{queue} WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM free))
    RETURNING msg_id, read_ct, (message ->> 'command'::text)::bigint AS command
), moved AS (
    UPDATE commandbus.command c
       SET status = 'CANCELED', finished_at = pg_catalog.now(), attempt_base = c.attempt_base + g.read_ct
      FROM gone g
     WHERE c.id = g.command AND c.msg_id = g.msg_id
    RETURNING c.id, c.command_id, c.command_type, c.correlation_id, c.reply_to, c.attempt_base, c.batch, c.process,
              c.step, g.msg_id
), noted AS (
    INSERT INTO commandbus.attempt (command, number, verdict, error_type, error_code, error)
    SELECT id, attempt_base, 'EXPIRED', %(error_type)s, %(error_code)s, %(error)s FROM moved
)
SELECT id, command_id, command_type, correlation_id, reply_to, batch, process, step, msg_id FROM moved
UNION ALL
SELECT id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
  FROM target WHERE id <> ALL (ARRAY(SELECT id FROM moved))
