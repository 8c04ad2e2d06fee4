-- Moves a process, if it has not moved since it was read; closes steps, and counts it in its batch when it ends. Returns no
-- row if it has moved. A step that took a signal gets the signal's message (c, i).
--
-- Locks: the process row. After this, the transaction only settles the message. Indexes: the keys. If one of its
-- commands went to the troubleshooting queue meanwhile, the process waits for that.
WITH moved AS (
    UPDATE commandbus.process
       SET status = CASE WHEN in_tsq > 0 AND NOT %(is_final)s::boolean THEN 'WAITING_FOR_TSQ' ELSE %(status)s::text END,
           is_compensating = %(is_compensating)s, state = %(state)s::json, failure = %(failure)s::json,
           timer = %(timer)s, cancel = COALESCE(cancel, %(cancel)s::json), parent_step = %(parent_step)s, version = version + 1, updated_at = pg_catalog.now(),
           started_at = COALESCE(started_at, pg_catalog.now()),
           finished_at = CASE WHEN %(is_final)s::boolean THEN pg_catalog.now() END
     WHERE id = %(id)s AND version = %(version)s
    RETURNING id, batch, in_tsq
), closed AS (
    UPDATE commandbus.process_step s
       SET status = c.s, closed = c.k, result = c.v, error = c.e,
           command = COALESCE(s.command, c.c), command_id = COALESCE(c.i, s.command_id),
           finished_at = COALESCE((SELECT finished_at FROM commandbus.command WHERE id = s.command),
                                  pg_catalog.now())
      FROM pg_catalog.json_to_recordset(%(closed)s::json) AS c(n integer, s text, k integer, v json, e json, c bigint,
                                                                        i text)
     WHERE s.process = %(id)s AND s.number = c.n AND EXISTS (SELECT FROM moved)
), counted AS (
    INSERT INTO commandbus.batch_delta (batch, completed, failed, canceled, in_tsq)
    SELECT batch, (%(status)s::text = 'COMPLETED')::integer, (%(status)s::text IN ('FAILED', 'COMPENSATED'))::integer,
           (%(status)s::text = 'CANCELED')::integer, -(in_tsq > 0)::integer
      FROM moved
     WHERE batch IS NOT NULL AND %(is_final)s::boolean
)
SELECT id FROM moved
