-- Compares commands with those that were sent before under the same ids. Returns which field differs, if any.
-- Locks: none. Index: command_domain_command_id_key.
SELECT command_id, id, difference FROM commandbus.compare_commands(%(domain)s, %(rows)s::json)
