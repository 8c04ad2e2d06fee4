-- Between which ids the commands of a time are: `lowest` has the id of a command that was sent before, so none with a smaller id
-- matters; `highest` likewise. It halves the range of ids some thirty times. Commands are numbered when they are inserted, and
-- dated when their transaction began. So the search leaves an hour: it is right as long as no sender's transaction is longer.
-- Locks: none. Index: command's key, one entry for each step.
WITH RECURSIVE ends AS MATERIALIZED (
    SELECT COALESCE(pg_catalog.min(id), 0) - 1 AS lowest, COALESCE(pg_catalog.max(id), 0) + 1 AS highest FROM commandbus.command
), early AS (
    SELECT lowest, highest, 0 AS n FROM ends
    UNION ALL
    SELECT CASE WHEN p.is_before THEN p.id ELSE s.lowest END,
           CASE WHEN p.is_before THEN s.highest ELSE s.lowest + (s.highest - s.lowest) / 2 END, s.n + 1
      FROM early s
     CROSS JOIN LATERAL (
           SELECT c.id, c.created_at < %(after)s::timestamptz - interval '1 hour' AS is_before FROM commandbus.command c
            WHERE c.id >= s.lowest + (s.highest - s.lowest) / 2 ORDER BY c.id LIMIT 1) p
     WHERE s.highest - s.lowest > 100 AND s.n < 100 AND %(after)s::timestamptz IS NOT NULL
), late AS (
    SELECT lowest, highest, 0 AS n FROM ends
    UNION ALL
    SELECT CASE WHEN p.is_after THEN s.lowest ELSE p.id END,
           CASE WHEN p.is_after THEN s.lowest + (s.highest - s.lowest) / 2 ELSE s.highest END, s.n + 1
      FROM late s
     CROSS JOIN LATERAL (
           SELECT c.id, c.created_at >= %(before)s::timestamptz + interval '1 hour' AS is_after FROM commandbus.command c
            WHERE c.id >= s.lowest + (s.highest - s.lowest) / 2 ORDER BY c.id LIMIT 1) p
     WHERE s.highest - s.lowest > 100 AND s.n < 100 AND %(before)s::timestamptz IS NOT NULL
)
SELECT (SELECT lowest FROM early ORDER BY n DESC LIMIT 1), (SELECT highest FROM late ORDER BY n DESC LIMIT 1)
