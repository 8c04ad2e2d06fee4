-- The messages of a PGMQ queue that could be read now, oldest first. They stay as they are. Locks: none.
-- Index: the queue's key.
SELECT m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message::text, m.headers::text{last_read}
  FROM pgmq.{queue} AS m
 WHERE m.vt <= pg_catalog.clock_timestamp()
 ORDER BY m.msg_id
 LIMIT %(qty)s
