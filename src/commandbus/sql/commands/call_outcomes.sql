-- The outcomes of commands that the caller can name; see 0001_schema.sql. Locks: none.
-- Indexes: command_domain_command_id_key, the key of attempt, operator_action_command.
SELECT id, domain, command_id, status, result, error_type, error_code, error, operator, reason
  FROM commandbus.outcomes(%(domains)s::text[], %(command_ids)s::text[])
