-- The last checkpoint of one command. Locks: none. Index: the key.
SELECT k.value::text, k.attempt, k.at
  FROM commandbus.checkpoint k
  JOIN commandbus.command c ON c.id = k.command
 WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s
