-- Forgets rows of parked whose message is gone, whatever took it: they would stay at the head of the line for ever.
-- Locks: those rows; nobody else looks at them. Indexes: parked_domain_msg_id_key, the queue's key.
DELETE FROM commandbus.parked p
 WHERE p.domain = %(domain)s AND p.msg_id = ANY (%(msg_ids)s)
   AND NOT EXISTS (SELECT FROM pgmq.{queue} q WHERE q.msg_id = p.msg_id)
RETURNING p.seq
