-- The commands of a domain that a worker is running. Locks: none. Reads the queue once, then the command's key.
SELECT c.id
  FROM (SELECT msg_id, message ->> 'command'::text AS command
          FROM pgmq.{queue}
         WHERE headers ? 'held_by'::text) q
  JOIN commandbus.command c
    ON c.id = CASE WHEN q.command ~ '^[0-9]{1,18}$' THEN q.command::bigint END
   AND c.msg_id = q.msg_id AND c.domain = %(domain)s
