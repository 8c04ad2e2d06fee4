-- A person canceled, or completed by hand, messages that a process had not handled. The process cannot go on by itself, so
-- it fails. (If the message was only a timer, the process goes on, without a deadline. If it was a signal, the process goes
-- on without the signal.) Returns the processes that failed, where to reply, the parent and its step if it is a nested
-- process, and whether another of their commands is in the troubleshooting queue: a failed process does not count as
-- waiting for it any more. If the message asked a nested process that had ended to undo itself, its parent is told that
-- this has failed.
--
-- Locks: process rows in key order. Index: the key.
WITH locked AS MATERIALIZED (
    SELECT id FROM commandbus.process
     WHERE id IN (SELECT process FROM commandbus.command
                   WHERE id = ANY (%(messages)s::bigint[]) AND COALESCE(data ->> 'event'::text NOT IN ('deadline', 'signal'), true))
       AND finished_at IS NULL
     ORDER BY id
       FOR NO KEY UPDATE
), failed AS (
    UPDATE commandbus.process p
       SET status = 'FAILED', finished_at = pg_catalog.now(), updated_at = pg_catalog.now(), version = version + 1,
           failure = pg_catalog.json_build_object('type', 'MessageEnded', 'code', 'MESSAGE_ENDED',
                                                  'message', %(why)s::text)
     WHERE p.id IN (SELECT id FROM locked)
    RETURNING p.id, p.batch, p.in_tsq, p.reply_to, p.domain, p.process_id, p.process_type, p.correlation_id, p.failure,
              p.state, p.parent, p.parent_step
)
SELECT batch, in_tsq > 0, reply_to,
       pg_catalog.json_build_object(
           'outcome', 'FAILED', 'domain', domain, 'process_id', process_id, 'process_type', process_type,
           'status', 'FAILED', 'correlation_id', correlation_id, 'error', failure, 'result', state)::text,
       parent, parent_step
  FROM failed
UNION ALL
SELECT NULL, false, p.reply_to,
       pg_catalog.json_build_object(
           'outcome', 'FAILED', 'domain', p.domain, 'process_id', p.process_id, 'process_type', p.process_type,
           'status', p.status, 'correlation_id', p.correlation_id, 'error', pg_catalog.json_build_object(
               'type', 'MessageEnded', 'code', 'MESSAGE_ENDED', 'message', %(why)s::text))::text,
       p.parent, -(c.data ->> 'step'::text)::integer
  FROM commandbus.command c JOIN commandbus.process p ON p.id = c.process
 WHERE c.id = ANY (%(messages)s::bigint[]) AND c.data ->> 'event'::text = 'undo'
   AND p.finished_at IS NOT NULL AND p.parent IS NOT NULL
