-- Repairs what crashes leave behind, and finds what is due: the limits that somebody waits for (even a limit that is gone),
-- and the domains with commands that have waited too long. Rows whose turn came more than a minute ago are deleted.
-- Notes that a worker serves the line: after a gap of a minute, all waits count from the beginning again.
-- Locks: rows of parked that are not used any more; rows of limits in key order, except locked ones.
-- Indexes: parked_woken, parked_give_up, parked_limit (from name to name), parked_waiting; limits is small.
WITH RECURSIVE awaited(name) AS (
    (SELECT p.limit_name FROM commandbus.parked p WHERE p.limit_name IS NOT NULL AND p.woken_at IS NULL
      ORDER BY p.limit_name LIMIT 1)
    UNION ALL
    SELECT (SELECT p.limit_name FROM commandbus.parked p WHERE p.limit_name > a.name AND p.woken_at IS NULL
             ORDER BY p.limit_name LIMIT 1)
      FROM awaited a
     WHERE a.name IS NOT NULL
), forgotten AS (
    DELETE FROM commandbus.parked
     WHERE seq = ANY (ARRAY(
           SELECT seq FROM commandbus.parked
            WHERE (woken_at < pg_catalog.now() - interval '1 minute')
                  OR (domain = '' AND give_up_at < pg_catalog.now() - interval '5 seconds')
            LIMIT 1000 FOR UPDATE SKIP LOCKED))
), tended AS (
    UPDATE commandbus.limits l
       SET tended_at = pg_catalog.clock_timestamp(),
           tended_since = CASE WHEN l.tended_at > pg_catalog.clock_timestamp() - interval '1 minute'
                               THEN l.tended_since ELSE pg_catalog.clock_timestamp() END
     WHERE l.name = ANY (ARRAY(
           SELECT x.name FROM commandbus.limits x
            WHERE (x.tended_at IS NULL OR x.tended_at < pg_catalog.now() - interval '5 seconds')
              AND (SELECT true FROM commandbus.parked p
                    WHERE p.limit_name = x.name AND p.woken_at IS NULL AND {claimable}
                    ORDER BY p.since LIMIT 1)
            ORDER BY x.name
              FOR NO KEY UPDATE OF x SKIP LOCKED))
)
SELECT a.name, '' FROM awaited a WHERE a.name IS NOT NULL
UNION ALL
(SELECT DISTINCT '', w.domain
   FROM commandbus.limits l
  CROSS JOIN LATERAL (
        SELECT p.domain FROM commandbus.parked p
         WHERE p.limit_name = l.name AND p.woken_at IS NULL AND p.domain <> ''
           AND p.first_parked_at <= pg_catalog.now() - pg_catalog.make_interval(secs => l.max_wait) AND {claimable}
         ORDER BY p.first_parked_at LIMIT 500) w
  WHERE greatest(l.good_at, l.tended_since) <= pg_catalog.now() - pg_catalog.make_interval(secs => l.max_wait))
