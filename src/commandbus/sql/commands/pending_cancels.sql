-- Which of the attempts that this worker still holds has somebody asked to cancel? Locks: none. Index: the queue's key.
SELECT i.m, i.r, q.headers -> 'cancel'::text ->> 'by'::text, q.headers -> 'cancel'::text ->> 'reason'::text
  FROM unnest(%(msg_ids)s::bigint[], %(read_cts)s::integer[], %(commands)s::bigint[]) AS i(m, r, c)
 CROSS JOIN LATERAL (
       SELECT headers
         FROM pgmq.{queue}
        WHERE msg_id = i.m AND read_ct = i.r
          AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text) AND headers ? 'cancel'::text
          AND message -> 'command'::text = pg_catalog.to_jsonb(i.c)
       OFFSET 0) q
