-- Which worker runs these commands of one domain, and since when. Locks: none. Index: the queue's key.
SELECT msg_id,
       CASE WHEN pg_catalog.jsonb_typeof(headers -> 'held_by'::text) = 'string' THEN headers ->> 'held_by'::text END,
       CASE WHEN pg_catalog.jsonb_typeof(headers -> 'since'::text) = 'string' THEN headers ->> 'since'::text END
  FROM pgmq.{queue}
 WHERE msg_id = ANY (%(msg_ids)s::bigint[])
