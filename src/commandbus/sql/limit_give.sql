-- Gives places back, and breaks the row of bad answers after a good one. Says whether somebody waits, and who
-- is the probe.
-- Locks: the limit's row, if anything changes in it. Indexes: limits_pkey, parked_limit (the ORDER BY keeps
-- the planner on it, whatever it believes of how many wait).
WITH given AS (
    UPDATE commandbus.limits l
       SET holders = l.holders - %(tokens)s::text[],
           failures = CASE WHEN %(good)s AND l.step = 0 AND NOT l.is_open THEN 0 ELSE l.failures END
     WHERE l.name = %(name)s
       AND (l.holders ?| %(tokens)s::text[] OR (%(good)s AND l.failures > 0 AND l.step = 0 AND NOT l.is_open))
)
SELECT (SELECT true FROM commandbus.parked p
         WHERE p.limit_name = %(name)s AND p.woken_at IS NULL AND {claimable}
         ORDER BY p.since LIMIT 1) IS NOT NULL,
       (SELECT probe FROM commandbus.limits WHERE name = %(name)s)
