-- Compares commands with what was to be sent under the same ids: which field differs, if any.
-- Locks: none. Index: command_domain_command_id_key.
SELECT command_id, id, difference FROM commandbus.compare_commands(%(domain)s, %(rows)s::json)
