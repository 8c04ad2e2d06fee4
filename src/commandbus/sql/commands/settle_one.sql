-- commands/settle_final.sql for one completion in the transaction of its handler, without a reply, a batch or a
-- process. Returns a row if it was settled. Otherwise the caller rolls back. It finishes now, and not at now(), which is when
-- the handler's transaction began.
--
-- Fence and row writes: as there; `sent` is when the command was sent. It waits for a locked queue row, as long as the
-- handler's lock_timeout allows.
-- Locks: the queue row, then the command row. Indexes: the queue's key, the command's key.
WITH gone AS (
    DELETE FROM pgmq.{queue}
     WHERE msg_id = %(msg_id)s
       AND read_ct = %(read_ct)s
       AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
       AND message -> 'command'::text = pg_catalog.to_jsonb(%(command)s::bigint)
    RETURNING msg_id
)
UPDATE commandbus.command
   SET status = 'COMPLETED', result = %(result)s::json, attempt = %(number)s, worker = %(worker)s,
       started_at = pg_catalog.to_timestamp(%(started)s::float8), finished_at = pg_catalog.clock_timestamp()
 WHERE id = %(command)s::bigint AND msg_id = %(msg_id)s AND pg_catalog.date_part('epoch', created_at) = %(sent)s::float8
   AND EXISTS (SELECT FROM gone)
RETURNING id
