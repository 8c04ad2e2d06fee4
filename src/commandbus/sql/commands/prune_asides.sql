-- Removes a bite each of old things that were put aside; see 0001_schema.sql. Locks: the rows themselves.
SELECT commandbus.prune_asides(%(age)s, %(bite)s)
