-- An operator ends commands in the troubleshooting queue: CANCELED, or COMPLETED with a result given by hand.
-- Returns what a reply, a batch and a process need.
--
-- Locks: tsq rows in key order ({locking} may pass locked ones by), then command rows. Index: tsq's key or tsq_domain_type.
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
), moved AS (
    UPDATE commandbus.command c
       SET status = %(status)s::commandbus.command_status, result = %(result)s::json, attempt_base = c.attempt, attempt = NULL,
           finished_at = pg_catalog.now(), worker = NULL
     WHERE c.id IN (SELECT command FROM picked)
    RETURNING c.id, c.command_id, c.command_type, c.correlation_id, c.reply_to, c.attempt_base,
              c.batch, c.process, c.step
), noted AS (
    INSERT INTO commandbus.operator_action (command, action, operator, reason, attempt_base)
    SELECT id, %(action)s, %(operator)s, %(reason)s, attempt_base FROM moved
)
SELECT id, command_id, command_type, correlation_id, reply_to, batch, process, step FROM moved ORDER BY id
