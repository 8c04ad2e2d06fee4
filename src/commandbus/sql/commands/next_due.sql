-- In how many seconds the next delayed message of a domain becomes visible. Returns null if there is none within the
-- time asked for, or if the domain is paused. Locks: none. Index: q_*_vt_idx, between now and then. The range is
-- bounded, because under a long-open transaction the index still has the ends of all leases that were settled since.
--
-- In the bands of high and low priority (ADR 27) it also finds what is due already, which a claim of the normal band does
-- not see: the answer is then 50 ms, because that message may be locked.
SELECT extract(epoch FROM pg_catalog.min(
           CASE WHEN shift = interval '0' THEN q.vt
                ELSE greatest(q.vt - shift, pg_catalog.clock_timestamp() + interval '50 milliseconds') END)
               - pg_catalog.clock_timestamp())::float8
  FROM {bands}
 CROSS JOIN LATERAL (
       SELECT vt
         FROM pgmq.{queue}
        WHERE vt > CASE WHEN shift = interval '0' THEN pg_catalog.now()
                        WHEN shift < interval '0' THEN '-infinity'::timestamptz
                        ELSE timestamptz 'epoch' + shift END
          AND vt <= pg_catalog.now() + shift + pg_catalog.make_interval(secs => %(within)s)
          AND NOT EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = '')
        ORDER BY vt
        LIMIT 1) q
