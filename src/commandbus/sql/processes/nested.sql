-- A nested process of a process, by its name. Locks: none. Index: process_domain_process_id_key.
SELECT id, process_type FROM commandbus.process
 WHERE domain = %(domain)s AND process_id = %(process_id)s AND parent = %(parent)s
