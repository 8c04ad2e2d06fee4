-- Sends one command with a key; see 0001_schema.sql. A function, because a producer may not read what others have sent.
-- Locks: the row of the key, until the end of the transaction; then the queue row and the command row of a waiting command
-- that the key names. Indexes: the keys; command_domain_command_id_key.
SELECT outcome, id, command_id
  FROM commandbus.send_unique(%(domain)s, %(key)s, %(held_while)s, %(window)s, %(on_conflict)s, %(max_delay)s, %(own_id)s,
                              %(row)s::json)
