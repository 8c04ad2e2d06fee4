-- Moves messages from a PGMQ queue to its archive, as pgmq.archive does. Locks: their rows. Index: the queue's key.
WITH taken AS (
    DELETE FROM pgmq.{queue} AS m
     WHERE m.msg_id = ANY (%(msg_ids)s::bigint[])
    RETURNING m.msg_id, m.vt, m.read_ct, m.enqueued_at, m.message, m.headers{last_read}
)
INSERT INTO pgmq.{archive} (msg_id, vt, read_ct, enqueued_at, message, headers{last_read_column})
SELECT msg_id, vt, read_ct, enqueued_at, message, headers{last_read_column} FROM taken
RETURNING msg_id
