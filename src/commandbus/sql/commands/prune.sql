-- Removes a bite of finished commands and everything about them; see 0001_schema.sql.
-- Locks: command rows that nobody else holds. Index: the key.
SELECT removed, last_id, seen, all_young
  FROM commandbus.prune_commands(%(after_id)s, %(bite)s, %(through_id)s, %(age)s)
