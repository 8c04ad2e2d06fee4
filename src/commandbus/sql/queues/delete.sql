-- Removes messages from a PGMQ queue. Locks: their rows. Index: the queue's key.
DELETE FROM pgmq.{queue} WHERE msg_id = ANY (%(msg_ids)s::bigint[]) RETURNING msg_id
