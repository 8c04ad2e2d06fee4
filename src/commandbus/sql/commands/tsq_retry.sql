-- An operator's retry. Commands leave the troubleshooting queue for their domain's queue, and their attempts start
-- again: a new message, whose read_ct is 0; the number continues from attempt_base; no attempt is waived yet, and no snooze
-- is counted. The command does not expire any more, because a person wants it to run. A command that got stuck or crashed
-- its worker stays in quarantine. A command with a key joins the line of its key again, at its old place: it is hidden until its turn
-- comes.
--
-- Locks: tsq rows in key order (if two operators act, the second waits, then finds nothing; {locking} may pass locked ones by), then the new queue rows, then
-- command rows. Index: tsq's key or tsq_domain_type; attempt's key.
WITH picked AS MATERIALIZED (
    SELECT t.command
      FROM commandbus.tsq t
     WHERE t.domain = %(domain)s
       AND (%(ids)s::bigint[] IS NULL OR t.command = ANY (%(ids)s::bigint[]))
       AND (%(command_type)s::text IS NULL OR t.command_type = %(command_type)s)
       AND (%(error_code)s::text IS NULL OR t.error_code = %(error_code)s)
       AND (%(entered_before)s::timestamptz IS NULL OR t.entered_at < %(entered_before)s)
     ORDER BY t.command
     LIMIT %(limit)s
       FOR UPDATE {locking}
), gone AS (
    DELETE FROM commandbus.tsq WHERE command IN (SELECT command FROM picked)
), queued AS (
    INSERT INTO pgmq.{queue} (vt, message)
    SELECT CASE WHEN EXISTS (SELECT FROM commandbus.keyed k WHERE k.command = p.command)
                THEN pg_catalog.now() + interval '10 years' ELSE pg_catalog.clock_timestamp() END
           + {shift_for c.priority},
           pg_catalog.jsonb_build_object('command', p.command)
      FROM picked p LEFT JOIN commandbus.command c ON c.id = p.command
    RETURNING msg_id, (message ->> 'command'::text)::bigint AS command
), moved AS (
    UPDATE commandbus.command c
       SET status = 'PENDING', msg_id = q.msg_id, attempt_base = c.attempt, waived = 0, attempt = NULL,
           worker = NULL, started_at = NULL, result = NULL, suspect = NULL, alone = NULL,
           expires_at = NULL, snoozes = NULL, snoozed_at = NULL,
           quarantine = c.quarantine OR EXISTS (
               SELECT FROM commandbus.attempt a
                WHERE a.command = c.id AND a.number = c.attempt AND a.rung IN ('stuck', 'kill', 'crash'))
      FROM queued q
     WHERE c.id = q.command
    RETURNING c.id, c.command_id, c.attempt_base, c.batch, c.process
), rejoined AS (
    UPDATE commandbus.keyed k SET msg_id = q.msg_id, state = 'NEW' FROM queued q WHERE k.command = q.command
), noted AS (
    INSERT INTO commandbus.operator_action (command, action, operator, reason, attempt_base)
    SELECT id, 'RETRY', %(operator)s, %(reason)s, attempt_base FROM moved
), woken AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, '0') FROM moved HAVING pg_catalog.count(*) > 0
)
SELECT id, command_id, batch, process, (SELECT pg_catalog.count(*) FROM woken) FROM moved ORDER BY id
