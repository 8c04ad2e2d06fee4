-- How many commands need a person, by domain and type. Locks: none.
SELECT domain, command_type, pg_catalog.count(*)
  FROM commandbus.tsq
 WHERE (%(domain)s::text IS NULL OR domain = %(domain)s)
   AND (%(command_type)s::text IS NULL OR command_type = %(command_type)s)
   AND (%(error_code)s::text IS NULL OR error_code = %(error_code)s)
 GROUP BY domain, command_type
 ORDER BY domain, command_type
