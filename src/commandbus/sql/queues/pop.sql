-- Reads messages of a PGMQ queue and removes them, oldest first, as pgmq.pop does. Locks: rows that nobody else holds.
-- Index: the queue's key.
DELETE FROM pgmq.{queue} AS m
 WHERE m.msg_id = ANY (ARRAY(SELECT q.msg_id FROM pgmq.{queue} q
                              WHERE q.vt <= pg_catalog.clock_timestamp()
                              ORDER BY q.msg_id
                              LIMIT %(qty)s
                                FOR UPDATE SKIP LOCKED))
RETURNING m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message::text, m.headers::text{last_read}
