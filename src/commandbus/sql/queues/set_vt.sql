-- Moves the moment at which a message of a PGMQ queue can be read, as pgmq.set_vt does. Locks: its row.
-- Index: the queue's key.
UPDATE pgmq.{queue} AS m
   SET vt = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(vt)s::float8)
 WHERE m.msg_id = %(msg_id)s::bigint
RETURNING m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message::text, m.headers::text{last_read}
