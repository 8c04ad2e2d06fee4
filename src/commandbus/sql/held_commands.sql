-- The commands of a domain that somebody is running. Locks: none. Reads the queue once.
SELECT (message ->> 'command')::bigint
  FROM pgmq.{queue}
 WHERE headers ? 'held_by' AND message ->> 'command' ~ '^[0-9]{1,18}$'
