-- The next commands of a plan. `is_there`: it still needs a person, since the same moment. `is_ours`: nobody else has locked what the
-- plan needs of it, and this transaction has.
-- Locks: see plans/lock.sql. Indexes: the keys; each row is looked up, whatever the planner believes of tables that nobody has
-- analyzed yet.
WITH portion AS MATERIALIZED (
    SELECT command, entered_at
      FROM commandbus.plan_command
     WHERE plan = %(plan)s AND command > %(reached)s
     ORDER BY command
     LIMIT %(bite)s
)
SELECT p.command, t.command IS NOT NULL AS is_there, f.command IS NOT NULL AS is_ours
  FROM portion p
{lock}
 ORDER BY p.command
