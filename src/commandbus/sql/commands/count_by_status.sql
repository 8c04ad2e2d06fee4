-- How many commands of a domain have each status, and how many of them a worker holds. Locks: none. It reads all commands
-- of the domain. Index: command_domain_command_id_key, if the domain is rare.
SELECT c.status::text, pg_catalog.count(*), pg_catalog.count(*) FILTER (WHERE c.id = ANY (%(held)s::bigint[]))
  FROM commandbus.command c
 WHERE c.domain = %(domain)s AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s)
 GROUP BY c.status
