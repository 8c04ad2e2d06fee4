-- Removes all messages of a PGMQ queue. Unlike pgmq.purge_queue it needs only the right to delete, and makes only those
-- wait who want the same messages. Locks: their rows.
WITH gone AS (DELETE FROM pgmq.{queue} RETURNING msg_id)
SELECT pg_catalog.count(*) FROM gone
