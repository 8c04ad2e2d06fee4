-- The counts of one domain. A parked command whose turn has come (woken_at) does not count as parked. A message waits
-- from the moment at which it could be claimed, but at the earliest from when it was sent: it may have been sent for an
-- instant long ago.
-- Locks: none. Reads the queue once.
SELECT pg_catalog.count(*) FILTER (WHERE NOT held AND vt <= pg_catalog.now()),
       pg_catalog.count(*) FILTER (WHERE NOT held AND vt > pg_catalog.now())
           - (SELECT pg_catalog.count(*) FROM commandbus.parked WHERE domain = %(domain)s AND woken_at IS NULL)
           - (SELECT pg_catalog.count(*) FROM commandbus.keyed WHERE domain = %(domain)s AND state IN ('NEW', 'WAITING')),
       pg_catalog.count(*) FILTER (WHERE held),
       (SELECT pg_catalog.count(*) FROM commandbus.parked WHERE domain = %(domain)s AND woken_at IS NULL)
           + (SELECT pg_catalog.count(*) FROM commandbus.keyed WHERE domain = %(domain)s AND state IN ('NEW', 'WAITING')),
       (SELECT pg_catalog.count(*) FROM commandbus.tsq WHERE domain = %(domain)s),
       extract(epoch FROM pg_catalog.now()
               - pg_catalog.min(greatest(vt, enqueued_at, 'epoch'))
                     FILTER (WHERE NOT held AND vt <= pg_catalog.now()))::float8,
       (SELECT coalesce(pg_catalog.sum((rates ->> %(domain)s::text)::float8), 0) FROM commandbus.worker
         WHERE heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s)
           AND state <> 'STOPPED'),
       EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = ''),
       ARRAY(SELECT command_type FROM commandbus.pause
              WHERE domain = %(domain)s AND command_type <> '' ORDER BY 1),
       (SELECT pg_catalog.count(*) FROM commandbus.rejected_message WHERE domain = %(domain)s),
       pg_catalog.count(*) FILTER (WHERE NOT held AND vt <= pg_catalog.now() AND is_high),
       pg_catalog.count(*) FILTER (WHERE NOT held AND vt <= pg_catalog.now() AND is_low)
  FROM (SELECT {due_at} AS vt, vt < {early} AS is_high, vt >= {late} AS is_low, enqueued_at, COALESCE(headers ? 'held_by'::text, false) AS held FROM pgmq.{queue}) q
