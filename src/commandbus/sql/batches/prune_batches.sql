-- Removes finished batches of a bite of which nothing is left; see 0001_schema.sql.
-- Locks: batch rows that nobody else holds. Index: the key.
SELECT removed, seen, last_id FROM commandbus.prune_batches(%(after_id)s, %(bite)s, %(age)s)
