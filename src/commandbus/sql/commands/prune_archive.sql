-- Removes a bite of old messages from a queue's PGMQ archive. Locks: rows that nobody holds.
-- Index: archived_at_idx_*.
DELETE FROM pgmq.{archive}
 WHERE ctid = ANY (ARRAY(SELECT ctid FROM pgmq.{archive}
                          WHERE archived_at < pg_catalog.now() - pg_catalog.make_interval(secs => %(age)s::float8)
                          ORDER BY archived_at
                          LIMIT %(bite)s
                            FOR UPDATE SKIP LOCKED))
RETURNING msg_id
