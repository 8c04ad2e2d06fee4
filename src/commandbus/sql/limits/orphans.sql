-- Deletes rows of parked whose message is gone, for whatever reason. They would stay at the head of the line for ever.
-- Locks: those rows; nobody else looks at them. Indexes: parked_domain_msg_id_key, the queue's key.
DELETE FROM commandbus.parked
 WHERE seq = ANY (ARRAY(
       SELECT p.seq
         FROM pg_catalog.unnest(%(msg_ids)s::bigint[]) AS x(msg_id)
        CROSS JOIN LATERAL (
              SELECT seq FROM commandbus.parked WHERE domain = %(domain)s AND msg_id = x.msg_id OFFSET 0) p
        WHERE (SELECT true FROM pgmq.{queue} q WHERE q.msg_id = x.msg_id) IS NULL))
RETURNING seq
