-- Removes a bite of old plans and of previews that nobody started; see 0001_schema.sql. Locks: plan rows that nobody else holds.
SELECT commandbus.prune_plans(%(age)s, %(bite)s)
