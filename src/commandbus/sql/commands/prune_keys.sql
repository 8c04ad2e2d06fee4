-- Removes a bite of the keys that are not needed any more; see 0001_schema.sql.
-- Locks: key rows that nobody else holds. Indexes: the keys.
SELECT removed, seen, last_domain, last_key FROM commandbus.prune_keys(%(domain)s, %(key)s, %(bite)s)
