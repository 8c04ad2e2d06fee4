-- Commands whose expiry has passed, after a given one, in the order of their expiry, and whether they are PENDING.
-- Locks: none. Index: command_expires.
SELECT id, domain, expires_at, status OPERATOR(pg_catalog.=) 'PENDING'
  FROM commandbus.command
 WHERE (expires_at, id) > (%(after)s::timestamptz, %(after_id)s)
   AND expires_at <= pg_catalog.now()
 ORDER BY expires_at, id
 LIMIT %(limit)s
