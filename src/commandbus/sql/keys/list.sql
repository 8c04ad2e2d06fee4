-- The key limits of one domain, or of all.
-- Locks: none. Index: key_limit_pkey.
SELECT domain, name, concurrency, is_ordered, steps_aside FROM commandbus.key_limit
 WHERE %(domain)s::text IS NULL OR domain = %(domain)s ORDER BY domain, name
