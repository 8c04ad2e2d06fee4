-- Notes in the queue rows of suspects that they run now, alone and isolated: whoever finds that such a row was lost charges
-- the command for it.
--
-- Locks: queue rows that this worker holds. Index: the queue's key.
UPDATE pgmq.{queue}
   SET headers = headers || '{"alone": true}'
 WHERE msg_id = ANY (%(msg_ids)s::bigint[])
   AND headers ->> 'held_by' = %(worker)s
