-- Starts processes of one type: a row and a message each. A process_id that exists is left out; the caller compares.
-- Locks: new rows; a batch's row FOR KEY SHARE. Index: process_domain_process_id_key.
SELECT process_id, id
  FROM commandbus.start_processes(%(domain)s, %(process_type)s, %(batch)s, %(rows)s::json, %(counts)s)
