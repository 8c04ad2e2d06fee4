-- Removes a bite of finished batches that have no members left; see 0001_schema.sql.
-- Locks: batch rows that nobody else holds. Index: the key.
SELECT removed, seen, last_id FROM commandbus.prune_batches(%(after_id)s, %(bite)s, %(age)s)
