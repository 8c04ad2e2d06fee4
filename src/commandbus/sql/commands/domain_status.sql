-- The counts of one domain. Each looks at so many rows at most, in the order of an index; the caller knows from the first two
-- whether that were all. A parked command whose turn has come (woken_at) does not count as parked; parked messages, and those that
-- wait for the turn of their key, are hidden for ten years. A message waits from the moment at which it could be claimed, but at the
-- earliest from when it was sent: it may have been sent for an instant long ago.
-- A band of priorities without messages is left out: its walks would go on into the next band.
-- The walks over the queue have one bound each, and leave out the rest afterwards: of two bounds the planner would expect few rows, and
-- sort them.
-- Locks: none. Indexes: q_*_vt_idx in each band of priorities; parked_domain_msg_id_key; keyed_line; tsq_domain_type; rejected_domain.
WITH seen AS MATERIALIZED (
    SELECT band.shift, q.is_due, {due_at q.vt} AS vt, q.enqueued_at, COALESCE(q.headers ? 'held_by'::text, false) AS held
      FROM (SELECT * FROM (VALUES ('-infinity'::timestamptz, - {millennium}), ({early}, interval '0'), ({late}, {millennium}))
                           AS band (lowest, shift)
             WHERE (band.shift = interval '0'
            OR CASE WHEN band.shift < interval '0'
                    THEN (SELECT true FROM pgmq.{queue} WHERE vt < {early} ORDER BY vt LIMIT 1)
                    ELSE (SELECT true FROM pgmq.{queue} WHERE vt >= {late} ORDER BY vt LIMIT 1) END) OFFSET 0) band
     CROSS JOIN LATERAL (
           SELECT * FROM (SELECT true AS is_due, vt, enqueued_at, headers FROM pgmq.{queue}
                           WHERE vt >= band.lowest ORDER BY vt LIMIT %(most)s) due
            WHERE due.vt <= pg_catalog.now() + band.shift
           UNION ALL
           SELECT * FROM (SELECT false, vt, enqueued_at, headers FROM pgmq.{queue}
                           WHERE vt > pg_catalog.now() + band.shift ORDER BY vt LIMIT %(most)s) later
            WHERE later.vt < pg_catalog.now() + band.shift + interval '8 years') q
)
SELECT pg_catalog.count(*) FILTER (WHERE is_due), pg_catalog.count(*) FILTER (WHERE NOT is_due),
       pg_catalog.count(*) FILTER (WHERE is_due AND NOT held),
       pg_catalog.count(*) FILTER (WHERE is_due AND NOT held AND shift < interval '0'),
       pg_catalog.count(*) FILTER (WHERE is_due AND NOT held AND shift > interval '0'),
       pg_catalog.count(*) FILTER (WHERE is_due AND held), pg_catalog.count(*) FILTER (WHERE NOT is_due AND held),
       pg_catalog.count(*) FILTER (WHERE NOT is_due AND NOT held),
       (SELECT pg_catalog.count(*) FILTER (WHERE woken_at IS NULL)
          FROM (SELECT domain, woken_at FROM commandbus.parked WHERE (domain, msg_id) > (%(domain)s, 0)
                 ORDER BY domain, msg_id LIMIT %(most)s) x
         WHERE x.domain = %(domain)s),
       (SELECT pg_catalog.count(*)
          FROM (SELECT domain FROM commandbus.keyed
                 WHERE (domain, key_limit, key, command) > (%(domain)s, '', '', 0) AND state IN ('NEW', 'WAITING')
                 ORDER BY domain, key_limit, key, command LIMIT %(most)s) x
         WHERE x.domain = %(domain)s),
       (SELECT pg_catalog.count(*)
          FROM (SELECT domain FROM commandbus.tsq WHERE (domain, command_type, command) > (%(domain)s, '', 0)
                 ORDER BY domain, command_type, command LIMIT %(most)s) x
         WHERE x.domain = %(domain)s),
       (SELECT pg_catalog.count(*)
          FROM (SELECT FROM commandbus.rejected_message WHERE domain = %(domain)s ORDER BY domain, id LIMIT %(most)s) x),
       extract(epoch FROM pg_catalog.now()
               - pg_catalog.min(greatest(vt, enqueued_at, 'epoch')) FILTER (WHERE is_due AND NOT held))::float8,
       (SELECT coalesce(pg_catalog.sum((rates ->> %(domain)s::text)::float8), 0) FROM commandbus.worker
         WHERE heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s)
           AND state <> 'STOPPED'),
       EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = ''),
       ARRAY(SELECT command_type FROM commandbus.pause
              WHERE domain = %(domain)s AND command_type <> '' ORDER BY 1)
  FROM seen
