-- The next commands of a plan. `is_there`: it still needs a person, since the same moment; its row in tsq is locked then.
-- Locks: tsq rows in key order. Indexes: the keys of plan_command and tsq; each row is looked up, whatever the planner believes of
-- tables that nobody has analyzed yet.
WITH portion AS MATERIALIZED (
    SELECT command, entered_at
      FROM commandbus.plan_command
     WHERE plan = %(plan)s AND command > %(reached)s
     ORDER BY command
     LIMIT %(bite)s
)
SELECT p.command, f.command IS NOT NULL AS is_there
  FROM portion p
  LEFT JOIN LATERAL (
       SELECT t.command
         FROM commandbus.tsq t
        WHERE t.command = p.command AND t.entered_at = p.entered_at AND t.domain = %(domain)s
          FOR UPDATE) f ON true
 ORDER BY p.command
