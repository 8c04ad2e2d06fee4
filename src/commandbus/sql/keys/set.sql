-- Creates a key limit or changes it.
-- Locks: its row. Index: key_limit_pkey.
INSERT INTO commandbus.key_limit AS l (domain, name, concurrency, is_ordered, steps_aside, declared)
VALUES (%(domain)s, %(name)s, %(concurrency)s, %(ordered)s, %(aside)s, %(declared)s::text)
ON CONFLICT (domain, name) DO UPDATE
   SET concurrency = excluded.concurrency, is_ordered = excluded.is_ordered, steps_aside = excluded.steps_aside,
       declared = COALESCE(excluded.declared, l.declared)
RETURNING name
