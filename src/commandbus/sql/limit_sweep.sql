-- Puts right what crashes leave behind, and finds what is due: the limits that somebody waits for, and the domains with
-- commands that have waited too long. Rows of those whose turn came a minute ago have no use any more.
-- Locks: rows of parked that nobody uses. Indexes: parked_woken, parked_give_up, parked_limit.
WITH forgotten AS (
    DELETE FROM commandbus.parked
     WHERE seq = ANY (ARRAY(
           SELECT seq FROM commandbus.parked
            WHERE (woken_at < pg_catalog.now() - interval '1 minute')
                  OR (domain = '' AND give_up_at < pg_catalog.now() - interval '5 seconds')
            LIMIT 1000 FOR UPDATE SKIP LOCKED))
)
SELECT l.name, '' FROM commandbus.limits l
 WHERE (SELECT true FROM commandbus.parked p WHERE p.limit_name = l.name AND p.woken_at IS NULL
         ORDER BY p.since LIMIT 1)
UNION ALL
(SELECT DISTINCT '', domain FROM commandbus.parked
  WHERE give_up_at <= pg_catalog.now() AND woken_at IS NULL AND domain <> '')
