-- Records that somebody asked to cancel a process that is neither final nor being undone. A second request changes nothing.
-- A process that has sent nothing yet is CANCELED at once: there is nothing to undo, and its code may not even be able
-- to begin. Returns the process, the status that it had, whether this ended it, where to reply, the parent and its step if it
-- is a nested process, and whether it waits for something other than commands; no row if it cannot be canceled.
--
-- Locks: the process row; new rows of batch_delta. Index: process_domain_process_id_key. The version is increased, so a
-- message that is being handled at this moment is handled again, and sees the request.
WITH target AS MATERIALIZED (
    SELECT id, status, in_tsq FROM commandbus.process
     WHERE domain = %(domain)s AND process_id = %(process_id)s AND finished_at IS NULL AND NOT is_compensating
       FOR NO KEY UPDATE
), asked AS (
    UPDATE commandbus.process p
       SET cancel = COALESCE(cancel, pg_catalog.json_build_object(
               'by', %(operator)s::text, 'reason', %(reason)s::text, 'at', pg_catalog.now())),
           status = CASE WHEN p.started_at IS NULL THEN 'CANCELED' ELSE p.status END,
           finished_at = CASE WHEN p.started_at IS NULL THEN pg_catalog.now() END,
           version = p.version + 1, updated_at = pg_catalog.now()
     WHERE p.id IN (SELECT id FROM target)
    RETURNING p.id, p.batch, p.finished_at, p.reply_to, p.correlation_id, p.process_type, p.parent, p.parent_step
), counted AS (
    INSERT INTO commandbus.batch_delta (batch, canceled, in_tsq)
    SELECT a.batch, 1, -(t.in_tsq > 0)::integer
      FROM asked a JOIN target t USING (id)
     WHERE a.batch IS NOT NULL AND a.finished_at IS NOT NULL
)
SELECT a.id, t.status, a.finished_at IS NOT NULL, a.batch, a.reply_to, a.correlation_id, a.process_type, a.parent,
       a.parent_step,
       EXISTS (SELECT FROM commandbus.process_step s
                WHERE s.process = a.id AND s.status = 'SENT' AND s.kind IS NOT NULL)
  FROM asked a JOIN target t USING (id)
