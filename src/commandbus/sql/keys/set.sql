-- Creates a key limit or changes it.
-- Locks: its row. Index: key_limit_pkey.
INSERT INTO commandbus.key_limit (domain, name, concurrency, is_ordered, steps_aside)
VALUES (%(domain)s, %(name)s, %(concurrency)s, %(ordered)s, %(aside)s)
ON CONFLICT (domain, name) DO UPDATE
   SET concurrency = excluded.concurrency, is_ordered = excluded.is_ordered, steps_aside = excluded.steps_aside
RETURNING name
