-- Removes all messages of a PGMQ queue. Unlike pgmq.purge_queue it needs no more rights than deleting does, and nobody waits
-- for it but who wants the same messages. Locks: their rows.
WITH gone AS (DELETE FROM pgmq.{queue} RETURNING msg_id)
SELECT pg_catalog.count(*) FROM gone
