-- What a replay of a command takes from it, and its state. Locks: its row against changes, so that no two operators
-- replay and cancel it at once. Index: command_domain_command_id_key.
SELECT id, command_type, data::text, headers::text, correlation_id, max_attempts, timeout, on_exhausted, priority, key_limit, key,
       status::text
  FROM commandbus.command
 WHERE domain = %(domain)s AND command_id = %(command_id)s
