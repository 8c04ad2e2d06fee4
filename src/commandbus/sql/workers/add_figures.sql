-- Adds to the current minute of a domain. The first worker that asks for it also counts what could run now, up to so many of
-- each priority, and removes the rows that are too old. Nothing is written if nothing was settled, claimed or ready. The
-- moment is a little before now, because the caller tells of what was before.
-- Locks: the row of that minute, until the end of this statement. Indexes: the key; q_*_vt_idx, a range of each band.
WITH this AS MATERIALIZED (
    SELECT pg_catalog.date_trunc('minute', pg_catalog.now() - interval '3 seconds') AS at
), looked AS MATERIALIZED (
    SELECT %(counts_ready)s::boolean
           AND NOT EXISTS (SELECT FROM commandbus.minute_figure f, this
                            WHERE f.at = this.at AND f.domain = %(domain)s AND f.ready IS NOT NULL) AS is_mine
), counted AS MATERIALIZED (
    SELECT pg_catalog.sum(due.count)::integer AS ready
      FROM {bands}
     CROSS JOIN LATERAL (
           SELECT pg_catalog.count(*) AS count
             FROM (SELECT FROM pgmq.{queue} q
                    WHERE q.vt <= pg_catalog.now() + band.shift
                      AND q.vt > pg_catalog.now() + band.shift - interval '4383000 hours'
                      AND (SELECT is_mine FROM looked)
                    LIMIT %(most)s) found) due
     WHERE (SELECT is_mine FROM looked)
), gone AS (
    DELETE FROM commandbus.minute_figure
     WHERE at < pg_catalog.now() - interval '2 hours' AND (SELECT is_mine FROM looked)
)
INSERT INTO commandbus.minute_figure AS f (at, domain, settled, ready, waits)
SELECT this.at, %(domain)s, %(settled)s, counted.ready, %(waits)s::bigint[]
  FROM this, counted
 WHERE %(settled)s::bigint > 0 OR counted.ready > 0
    OR EXISTS (SELECT FROM pg_catalog.unnest(%(waits)s::bigint[]) AS w (n) WHERE w.n > 0)
ON CONFLICT (at, domain) DO UPDATE
   SET settled = f.settled + excluded.settled, ready = COALESCE(f.ready, excluded.ready),
       waits = ARRAY(SELECT COALESCE(b.mine, 0) + COALESCE(b.theirs, 0)
                       FROM ROWS FROM (pg_catalog.unnest(excluded.waits), pg_catalog.unnest(f.waits)) WITH ORDINALITY
                         AS b (mine, theirs, n) ORDER BY b.n)
