-- Starts a plan that nobody has started: workers of its domain carry it out. Locks: the plan's row, held by the caller. Index: the key.
WITH started AS (
    UPDATE commandbus.plan
       SET state = 'RUNNING', started_by = %(operator)s, reason = COALESCE(%(reason)s, reason), started_at = pg_catalog.clock_timestamp(),
           next_at = pg_catalog.clock_timestamp()
     WHERE id = %(plan)s AND state = 'PREVIEWED'
    RETURNING domain
)
SELECT pg_catalog.pg_notify('commandbus_plans', domain) FROM started
