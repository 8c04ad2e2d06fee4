-- Locks the queue rows of parked commands. Leaves out commands that somebody is canceling at this moment.
-- Locks: queue rows in key order. Index: the queue's key.
SELECT msg_id FROM pgmq.{queue}
 WHERE msg_id = ANY (%(msg_ids)s) AND headers IS NULL
 ORDER BY msg_id
   FOR UPDATE SKIP LOCKED
