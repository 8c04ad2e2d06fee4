-- In how many seconds the next delayed message of a domain becomes visible, and in which bands of other priorities (ADR 27)
-- something is due within the time asked for: 1 is high, 2 is low, 3 is both. Returns nulls if there is nothing, or if the
-- domain is paused. Locks: none. Index: q_*_vt_idx, between now and then. The range is bounded, because under a long-open
-- transaction the index still has the ends of all leases that were settled since.
--
-- In the bands of high and low priority it also finds what is due already, from the claimer's cursors on: a claim of the
-- normal band does not say so if it finds nothing. The answer is then 50 ms, because that message may be locked.
SELECT extract(epoch FROM pg_catalog.min(
           CASE WHEN shift = interval '0' THEN q.vt
                ELSE greatest(q.vt - shift, pg_catalog.clock_timestamp() + interval '50 milliseconds') END)
               - pg_catalog.clock_timestamp())::float8,
       pg_catalog.bit_or(CASE WHEN shift < interval '0' THEN 1 WHEN shift > interval '0' THEN 2 ELSE 0 END)
  FROM {bands}
 CROSS JOIN LATERAL (
       SELECT vt
         FROM pgmq.{queue}
        WHERE vt > CASE WHEN shift = interval '0' THEN pg_catalog.now()
                        WHEN shift < interval '0' THEN %(high)s::timestamptz
                        ELSE %(low)s::timestamptz END
          AND vt <= pg_catalog.now() + shift + pg_catalog.make_interval(secs => %(within)s)
          AND NOT EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = '')
        ORDER BY vt
        LIMIT 1) q
