-- A part of commands/claim.sql: is anything due in the bands of high (1) and low (2) priority? Null if not.
-- Index: q_*_vt_idx, one entry each, from the claimer's cursors. The order says that it is this index.
(SELECT NULLIF(
            CASE WHEN (SELECT true FROM pgmq.{queue} WHERE vt <= pg_catalog.now() - {millennium}
                          AND (vt, msg_id) >= (%(high)s::timestamptz, 0) ORDER BY vt LIMIT 1) THEN 1 ELSE 0 END
            + CASE WHEN (SELECT true FROM pgmq.{queue} WHERE vt <= pg_catalog.now() + {millennium}
                            AND (vt, msg_id) >= (%(low)s::timestamptz, 0) ORDER BY vt LIMIT 1) THEN 2 ELSE 0 END, 0))
