-- How many members of each batch of a domain are running. A command runs while a worker holds it under a valid lease. A
-- process runs if it has begun and not ended.
--
-- Locks: none. Index: q_*_vt_idx (a held row becomes visible within a day, a parked row in years), then the command's key;
-- process_unfinished.
SELECT c.batch, pg_catalog.count(*)
  FROM (SELECT msg_id, message ->> 'command'::text AS command
          FROM {bands}
         CROSS JOIN LATERAL (
               SELECT msg_id, message
                 FROM pgmq.{queue}
                WHERE vt > pg_catalog.now() + shift AND vt < pg_catalog.now() + shift + interval '1 day'
                  AND headers ? 'held_by'::text
               OFFSET 0) h
        OFFSET 0) q
  JOIN commandbus.command c
    ON c.id = CASE WHEN q.command ~ '^[0-9]{1,18}$' THEN q.command::bigint END
   AND c.msg_id = q.msg_id AND c.domain = %(domain)s
 WHERE c.batch IS NOT NULL
 GROUP BY c.batch
UNION ALL
SELECT batch, pg_catalog.count(*)
  FROM commandbus.process
 WHERE domain = %(domain)s AND batch IS NOT NULL AND finished_at IS NULL AND started_at IS NOT NULL
 GROUP BY batch
