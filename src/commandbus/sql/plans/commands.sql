-- The commands of a plan, in the order in which they are dealt with, and what became of each. Locks: none.
-- Indexes: the keys of plan_command, command and tsq.
SELECT p.command, c.command_id, c.command_type, p.entered_at,
       CASE WHEN p.is_skipped THEN 'SKIPPED' WHEN p.is_locked THEN 'LOCKED' WHEN p.command <= l.reached THEN 'MOVED' ELSE 'WAITING' END,
       t.error_type, t.error_code, t.error
  FROM commandbus.plan l
  JOIN commandbus.plan_command p ON p.plan = l.id
  LEFT JOIN commandbus.command c ON c.id = p.command
  LEFT JOIN commandbus.tsq t ON t.command = p.command AND t.entered_at = p.entered_at
 WHERE l.id = %(plan)s AND p.command > %(after_id)s
 ORDER BY p.command
 LIMIT %(limit)s
