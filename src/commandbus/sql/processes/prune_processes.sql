-- Removes a bite of finished processes that have no commands left; see 0001_schema.sql.
-- Locks: process rows that nobody else holds. Index: the key.
SELECT removed, seen, last_id FROM commandbus.prune_processes(%(after_id)s, %(bite)s, %(age)s)
