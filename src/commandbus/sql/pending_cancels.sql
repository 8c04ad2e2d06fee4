-- Which of these attempts, still held by this worker, somebody asked to cancel. Locks: none. Index: the queue's key.
SELECT i.m, i.r, q.headers -> 'cancel' ->> 'by', q.headers -> 'cancel' ->> 'reason'
  FROM unnest(%(msg_ids)s::bigint[], %(read_cts)s::integer[]) AS i(m, r)
 CROSS JOIN LATERAL (
       SELECT headers
         FROM pgmq.{queue}
        WHERE msg_id = i.m AND read_ct = i.r AND headers -> 'held_by' = to_jsonb(%(worker)s::text) AND headers ? 'cancel'
       OFFSET 0) q
