-- Commands of a plan that were locked when their turn came, and are not any more. Those that are still locked are passed by, so that
-- they hold up nobody behind them. The columns are those of plans/portion.sql.
-- Locks: see plans/lock.sql. Indexes: plan_command_locked, and the keys.
SELECT p.command, t.command IS NOT NULL AS is_there, f.command IS NOT NULL AS is_ours
  FROM (SELECT command, entered_at
          FROM commandbus.plan_command
         WHERE plan = %(plan)s AND is_locked
         ORDER BY command
        OFFSET 0) p
{lock}
 WHERE t.command IS NULL OR f.command IS NOT NULL
 ORDER BY p.command
 LIMIT %(bite)s
