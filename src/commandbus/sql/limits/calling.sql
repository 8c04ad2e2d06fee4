-- The first commands (0: a block in a program) that wait for a limit. The caller wants to know whether there is more than
-- one.
-- Locks: none. Index: parked_limit.
SELECT DISTINCT command
  FROM (SELECT p.command FROM commandbus.parked p
         WHERE p.limit_name = %(name)s AND p.woken_at IS NULL AND {claimable}
         ORDER BY p.since LIMIT %(most)s) first
