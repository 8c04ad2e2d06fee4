-- Compares processes with what is to be started under the same ids: which field differs, if any. Locks: none.
-- Index: process_domain_process_id_key.
SELECT process_id, id, difference
  FROM commandbus.compare_processes(%(domain)s, %(process_type)s, %(batch)s, %(rows)s::json)
