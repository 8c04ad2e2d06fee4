-- The commands of a domain that are in its queue, up to a number, and which of them a worker holds.
-- Locks: none. Index: the queue's key.
SELECT CASE WHEN q.message ->> 'command'::text ~ '^[0-9]{1,18}$' THEN (q.message ->> 'command'::text)::bigint END,
       COALESCE(q.headers ? 'held_by'::text, false)
  FROM pgmq.{queue} q
 ORDER BY q.msg_id
 LIMIT %(most)s
