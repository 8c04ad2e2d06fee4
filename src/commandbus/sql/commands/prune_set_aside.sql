-- Removes one bite of each kind of old things that were set aside; see 0001_schema.sql. Locks: the rows themselves.
SELECT commandbus.prune_set_aside(%(age)s, %(bite)s)
