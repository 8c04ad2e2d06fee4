-- The next commands of a plan. `is_there`: it still needs a person, since the same moment; its row in tsq is locked then.
-- Locks: tsq rows in key order. Indexes: the keys of plan_command and tsq.
WITH portion AS MATERIALIZED (
    SELECT command, entered_at
      FROM commandbus.plan_command
     WHERE plan = %(plan)s AND command > %(reached)s
     ORDER BY command
     LIMIT %(bite)s
), found AS MATERIALIZED (
    SELECT t.command
      FROM commandbus.tsq t
      JOIN portion p ON p.command = t.command AND p.entered_at = t.entered_at
     WHERE t.domain = %(domain)s
     ORDER BY t.command
       FOR UPDATE OF t
)
SELECT p.command, f.command IS NOT NULL AS is_there
  FROM portion p
  LEFT JOIN found f ON f.command = p.command
 ORDER BY p.command
