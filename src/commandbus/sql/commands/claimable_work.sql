-- How much work of one domain could be claimed now, how long the first message has waited, and how many commands need a
-- person. Counts up to a given number. A paused domain has nothing to claim. A message waits from the moment at which it
-- could be claimed, but at the earliest from when it was sent.
--
-- Locks: none. Indexes: q_*_vt_idx up to now; tsq_domain_type, whose columns are compared as a row, which only this index offers.
WITH claimable AS (
    SELECT greatest(q.vt - shift, q.enqueued_at, 'epoch') AS since
      FROM {bands}
     CROSS JOIN LATERAL (
           SELECT vt, enqueued_at
             FROM pgmq.{queue}
            WHERE vt <= pg_catalog.now() + shift
              AND (vt, msg_id) >= (CASE WHEN shift < interval '0' THEN '-infinity'::timestamptz
                                        WHEN shift > interval '0' THEN {late} ELSE {early} END, 0)
              AND NOT EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = '')
            ORDER BY vt
            LIMIT %(most)s) q
     LIMIT %(most)s
)
SELECT (SELECT pg_catalog.count(*) FROM claimable),
       (SELECT extract(epoch FROM pg_catalog.now() - pg_catalog.min(since))::float8
          FROM claimable),
       (SELECT pg_catalog.count(*)
          FROM (SELECT t.domain FROM commandbus.tsq t
                 WHERE (t.domain, t.command_type, t.command) > (%(domain)s, '', 0)
                 ORDER BY t.domain, t.command_type, t.command
                 LIMIT %(most)s) troubled
         WHERE troubled.domain = %(domain)s)
