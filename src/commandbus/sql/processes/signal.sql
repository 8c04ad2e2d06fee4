-- Sends a signal to a process: a message to it; see 0001_schema.sql. Locks: new rows only.
-- Indexes: process_domain_process_id_key, command_domain_command_id_key.
SELECT id, refusal
  FROM commandbus.signal_process(%(domain)s, %(process_id)s, %(command_id)s, %(signal)s::json)
