-- The troubleshooting queue, longest waiting first. Locks: none. Index: tsq_domain_type or tsq's key.
SELECT c.id, c.domain, c.command_id, c.command_type, t.entered_at, t.attempt, t.error_type, t.error_code, t.error,
       c.data::text
  FROM commandbus.tsq t
  JOIN commandbus.command c ON c.id = t.command
 WHERE (%(domain)s::text IS NULL OR t.domain = %(domain)s)
   AND (%(command_type)s::text IS NULL OR t.command_type = %(command_type)s)
   AND (%(error_code)s::text IS NULL OR t.error_code = %(error_code)s)
   AND t.command > %(after_id)s
 ORDER BY t.command
 LIMIT %(limit)s
