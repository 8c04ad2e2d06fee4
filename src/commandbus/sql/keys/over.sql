-- Removes overrides that are over, of some domains, and returns them: their keys may have more places now.
-- Locks: their rows. Reads the whole table, which is small: people write it.
DELETE FROM commandbus.key_override
 WHERE domain = ANY (%(domains)s::text[]) AND until <= pg_catalog.now()
RETURNING domain, key_limit, key
