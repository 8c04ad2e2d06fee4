-- Notes in the queue rows of suspects that were lost before that they run now, alone: whoever finds such a row lost again
-- charges the command for it.
--
-- Locks: queue rows that this worker holds. Index: the queue's key.
UPDATE pgmq.{queue}
   SET headers = headers || '{"alone": true}'
 WHERE msg_id = ANY (%(msg_ids)s::bigint[])
   AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
