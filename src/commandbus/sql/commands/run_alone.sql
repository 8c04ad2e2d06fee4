-- Notes in the queue row of a suspect: it starts now, alone. (The suspect was lost before.) If the row is lost again, the worker
-- that finds it charges the command. Returns no row if this worker does not hold the row, or if the row is locked.
--
-- Locks: that queue row, SKIP LOCKED. Index: the queue's key.
UPDATE pgmq.{queue}
   SET headers = headers || '{"alone": true}'
 WHERE msg_id = ANY (ARRAY(
       SELECT msg_id
         FROM pgmq.{queue}
        WHERE msg_id = %(msg_id)s
          AND read_ct = %(read_ct)s
          AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
          AND message -> 'command'::text = pg_catalog.to_jsonb(%(command)s::bigint)
          FOR UPDATE SKIP LOCKED))
RETURNING msg_id
