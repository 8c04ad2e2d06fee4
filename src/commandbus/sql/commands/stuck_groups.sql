-- The newest attempts that had to be stopped, by where in the application's own code they hung and what stopped them: how many, the first,
-- the last, and the command of the last. Attempts that were not to blame are left out. Locks: none.
-- Index: attempt_stopped, backwards, over at most `budget` rows; then the commands' key.
WITH newest AS MATERIALIZED (
    SELECT a.command, a.rung, a.own_frame, a.finished_at,
           a.verdict <> 'WAIVED' AND (a.verdict <> 'CANCELED' OR a.rung <> 'cancel') AS is_to_blame
      FROM commandbus.attempt a
     WHERE a.rung IS NOT NULL AND a.finished_at >= COALESCE(%(since)s::timestamptz, '-infinity'::timestamptz)
     ORDER BY a.finished_at DESC
     LIMIT %(budget)s
)
SELECT c.domain, c.command_type, n.own_frame, n.rung, pg_catalog.count(*), pg_catalog.min(n.finished_at),
       pg_catalog.max(n.finished_at), (pg_catalog.array_agg(c.command_id ORDER BY n.finished_at DESC))[1],
       (SELECT pg_catalog.count(*) FROM newest) >= %(budget)s
  FROM newest n
 CROSS JOIN LATERAL (SELECT k.domain, k.command_type, k.command_id FROM commandbus.command k WHERE k.id = n.command OFFSET 0) c
 WHERE n.is_to_blame
   AND (%(domain)s::text IS NULL OR c.domain = %(domain)s)
   AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s)
 GROUP BY c.domain, c.command_type, n.own_frame, n.rung
