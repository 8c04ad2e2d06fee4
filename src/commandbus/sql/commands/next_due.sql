-- In how many seconds the next delayed message of a domain becomes visible. Returns no row if there is none within the
-- given time, or if the domain is paused. Locks: none. Index: q_*_vt_idx, between now and the end of that time. The range
-- is bounded, because during a long transaction the index still has the ends of all leases that were settled since.
SELECT extract(epoch FROM vt - pg_catalog.clock_timestamp())::float8
  FROM pgmq.{queue}
 WHERE vt > pg_catalog.now()
   AND vt <= pg_catalog.now() + pg_catalog.make_interval(secs => %(within)s)
   AND NOT EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = '')
 ORDER BY vt
 LIMIT 1
