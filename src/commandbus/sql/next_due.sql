-- When the next delayed message of a domain becomes visible, as seconds from now; no row if there is none or the
-- domain is paused. Locks: none. Index: q_*_vt_idx.
SELECT extract(epoch FROM vt - clock_timestamp())::float8
  FROM pgmq.{queue}
 WHERE vt > now()
   AND NOT EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = '')
 ORDER BY vt
 LIMIT 1
