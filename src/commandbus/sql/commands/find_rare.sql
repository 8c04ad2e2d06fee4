-- The ids of a domain's commands, in no useful order, up to a number.
-- Locks: none. Index: command_domain_command_id_key.
SELECT c.id
  FROM commandbus.command c
 WHERE c.domain = %(domain)s
 ORDER BY c.domain, c.command_id
 LIMIT %(most)s
