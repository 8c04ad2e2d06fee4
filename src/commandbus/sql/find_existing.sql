-- The content of commands by their command_ids, to compare with what was to be sent under the same id.
-- Locks: none. Index: command_domain_command_id_key.
SELECT id, command_id, command_type, data::text, correlation_id, reply_to, max_attempts, headers::text, timeout
  FROM commandbus.command
 WHERE domain = %(domain)s
   AND command_id = ANY (%(command_ids)s)
