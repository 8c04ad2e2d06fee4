-- Removes a bite each of old rejected messages, undelivered replies, stray replies of no process that is left,
-- what was done to limits and breakers, and workers that have not beaten for an age (at least a day). Locks: the
-- rows themselves. The tables are small: no index.
WITH rejected AS (
    DELETE FROM commandbus.rejected_message
     WHERE id IN (SELECT id FROM commandbus.rejected_message
                   WHERE rejected_at < pg_catalog.now()
                         - pg_catalog.make_interval(secs => %(age)s::float8) LIMIT %(bite)s)
    RETURNING 1
), undelivered AS (
    DELETE FROM commandbus.undelivered_reply
     WHERE id IN (SELECT id FROM commandbus.undelivered_reply
                   WHERE created_at < pg_catalog.now()
                         - pg_catalog.make_interval(secs => %(age)s::float8) LIMIT %(bite)s)
    RETURNING 1
), strays AS (
    DELETE FROM commandbus.stray_reply
     WHERE id IN (SELECT id FROM commandbus.stray_reply s
                   WHERE created_at < pg_catalog.now() - pg_catalog.make_interval(secs => %(age)s::float8)
                     AND NOT EXISTS (SELECT FROM commandbus.process p WHERE p.id = s.process) LIMIT %(bite)s)
    RETURNING 1
), actions AS (
    DELETE FROM commandbus.control_action
     WHERE id IN (SELECT id FROM commandbus.control_action
                   WHERE performed_at < pg_catalog.now()
                         - pg_catalog.make_interval(secs => %(age)s::float8) LIMIT %(bite)s)
    RETURNING 1
), workers AS (
    DELETE FROM commandbus.worker
     WHERE heartbeat_at < pg_catalog.now() - pg_catalog.make_interval(secs => greatest(%(age)s::float8, 86400))
    RETURNING 1
)
SELECT (SELECT pg_catalog.count(*) FROM rejected) + (SELECT pg_catalog.count(*) FROM undelivered)
       + (SELECT pg_catalog.count(*) FROM strays)
       + (SELECT pg_catalog.count(*) FROM actions) + (SELECT pg_catalog.count(*) FROM workers)
