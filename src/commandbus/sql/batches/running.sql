-- How many members of each batch of a domain are running. A command runs while a worker holds it under a valid lease. A
-- process runs if it has begun and not ended. It looks at the %(most)s messages that become visible next, and at as many processes.
--
-- Locks: none. Index: q_*_vt_idx (a held row becomes visible within a day, a parked row in years), then the command's key;
-- process_unfinished.
SELECT c.batch, pg_catalog.count(*)
  FROM (SELECT msg_id, message ->> 'command'::text AS command
          FROM (SELECT shift FROM {bands}
                 WHERE (band.shift = interval '0'
            OR CASE WHEN band.shift < interval '0'
                    THEN (SELECT true FROM pgmq.{queue} WHERE vt < {early} ORDER BY vt LIMIT 1)
                    ELSE (SELECT true FROM pgmq.{queue} WHERE vt >= {late} ORDER BY vt LIMIT 1) END) OFFSET 0) band
         CROSS JOIN LATERAL (
               SELECT msg_id, message, vt, headers
                 FROM pgmq.{queue}
                WHERE vt > pg_catalog.now() + shift
                ORDER BY vt
                LIMIT %(most)s) h
         WHERE h.vt < pg_catalog.now() + shift + interval '1 day' AND h.headers ? 'held_by'::text
        OFFSET 0) q
  JOIN commandbus.command c
    ON c.id = CASE WHEN q.command ~ '^[0-9]{1,18}$' THEN q.command::bigint END
   AND c.msg_id = q.msg_id AND c.domain = %(domain)s
 WHERE c.batch IS NOT NULL
 GROUP BY c.batch
UNION ALL
SELECT p.batch, pg_catalog.count(*)
  FROM (SELECT batch, domain, started_at FROM commandbus.process
         WHERE batch IS NOT NULL AND finished_at IS NULL ORDER BY batch LIMIT %(most)s) p
 WHERE p.domain = %(domain)s AND p.started_at IS NOT NULL
 GROUP BY p.batch
