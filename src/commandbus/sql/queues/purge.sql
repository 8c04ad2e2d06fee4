-- Removes all messages of a PGMQ queue. Unlike pgmq.purge_queue it needs only the right to delete, and only transactions
-- that want the same messages wait for it. Locks: their rows.
WITH gone AS (DELETE FROM pgmq.{queue} RETURNING msg_id)
SELECT pg_catalog.count(*) FROM gone
