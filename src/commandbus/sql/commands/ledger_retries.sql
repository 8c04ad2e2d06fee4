-- When operators put a command into its queue again, for its ledger. Locks: none. Index: operator_action_command.
SELECT performed_at
  FROM commandbus.operator_action
 WHERE command = %(command)s AND action = 'RETRY'
 ORDER BY performed_at DESC
 LIMIT %(limit)s
