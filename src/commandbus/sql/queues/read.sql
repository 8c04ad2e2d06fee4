-- Takes messages of a PGMQ queue for a time, oldest first, as pgmq.read does. Locks: rows that nobody else holds.
-- Index: the queue's key.
UPDATE pgmq.{queue} AS m
   SET vt = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(vt)s::float8),
       read_ct = m.read_ct + 1{set_last_read}
 WHERE m.msg_id = ANY (ARRAY(SELECT q.msg_id FROM pgmq.{queue} q
                              WHERE q.vt <= pg_catalog.clock_timestamp()
                              ORDER BY q.msg_id
                              LIMIT %(qty)s
                                FOR UPDATE SKIP LOCKED))
RETURNING m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message::text, m.headers::text{last_read}
