-- Lets a FAILED process go on; a nested process only if it is being undone. Returns what a message to it needs, and as JSON the messages that it has missed: those
-- that somebody ended before the process handled them, and replies that came while it was FAILED. They are sent again, after
-- a delay if a sleep is not over.
--
-- If its batch was canceled and all other members are final, that cancellation is done, even if a crash prevented its
-- record. Then no sweep cancels this process again, unless somebody asks once more. Otherwise the sweep must go on, for the
-- other members.
--
-- Locks: the process row, then its batch's (no transaction that has locked a batch's row waits for a process).
-- Indexes: process_domain_process_id_key, process_unfinished, command_process, stray_reply_process.
WITH moved AS (
    UPDATE commandbus.process
       SET status = CASE WHEN in_tsq > 0 THEN 'WAITING_FOR_TSQ' ELSE 'IN_PROGRESS' END, finished_at = NULL,
           failure = CASE WHEN is_compensating THEN failure END, updated_at = pg_catalog.now(),
           version = version + 1
     WHERE domain = %(domain)s AND process_id = %(process_id)s AND status = 'FAILED'
       AND (parent IS NULL OR is_compensating)
    RETURNING id, process_type, batch, in_tsq
), counted AS (
    INSERT INTO commandbus.batch_delta (batch, failed, in_tsq)
    SELECT batch, -1, (in_tsq > 0)::integer FROM moved WHERE batch IS NOT NULL
), spared AS (
    UPDATE commandbus.batch SET cancel = (cancel::jsonb || '{"done": true}')::json
     WHERE cancel IS NOT NULL AND cancel ->> 'done'::text IS NULL
       AND id = ANY (ARRAY(
           SELECT m.batch FROM moved m
            WHERE NOT EXISTS (SELECT FROM commandbus.process p
                               WHERE p.batch = m.batch AND p.finished_at IS NULL AND p.id <> m.id)))
), missed AS (
    SELECT 1 AS rank, c.id, c.data AS message
      FROM moved m JOIN commandbus.command c ON c.process = m.id AND c.step = 0
     WHERE c.status OPERATOR(pg_catalog.=) 'CANCELED'
        OR EXISTS (SELECT FROM commandbus.operator_action a WHERE a.command = c.id AND a.action = 'COMPLETE')
    UNION ALL
    SELECT 2, s.id, s.message FROM moved m JOIN commandbus.stray_reply s ON s.process = m.id
), wanted AS (
    SELECT DISTINCT ON (s.number) s.number, message,
           CASE WHEN s.kind = 'sleep' THEN greatest(extract(epoch FROM s.deadline_at - pg_catalog.clock_timestamp()), 0)
                ELSE 0 END AS delay
      FROM moved m
      JOIN commandbus.process_step s ON s.process = m.id AND s.status = 'SENT'
      JOIN missed ON message ->> 'step'::text = s.number::text
                 AND (message ->> 'event'::text = 'wake' AND s.kind = 'sleep'
                      OR message ->> 'event'::text = 'reply'
                         AND message #>> '{reply,outcome}'::text[] IN ('SUCCESS', 'FAILED', 'CANCELED'))
     ORDER BY s.number, missed.rank, missed.id
)
SELECT id, process_type, batch, 
       (SELECT pg_catalog.json_agg(pg_catalog.json_build_object('message', message, 'delay', delay) ORDER BY number)::text
          FROM wanted) FROM moved
