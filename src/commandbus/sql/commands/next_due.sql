-- When the next delayed message of a domain becomes visible, as seconds from now; no row if there is none within
-- the time asked for, or the domain is paused. Locks: none. Index: q_*_vt_idx, between now and then: under a
-- long-open transaction the ends of all leases that were settled since are still in there, further on.
SELECT extract(epoch FROM vt - pg_catalog.clock_timestamp())::float8
  FROM pgmq.{queue}
 WHERE vt > pg_catalog.now()
   AND vt <= pg_catalog.now() + pg_catalog.make_interval(secs => %(within)s)
   AND NOT EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = '')
 ORDER BY vt
 LIMIT 1
