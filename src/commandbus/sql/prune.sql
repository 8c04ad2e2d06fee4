-- Removes a bite of finished commands and everything about them; those of batches and processes that are not finished,
-- and of processes that finished within the age, stay. Answers how many went, and the id up to which
-- was looked, so that the next bite goes on from there instead of walking over what stays; and whether all that
-- was looked at is too young, which ends the walk (what was sent later cannot have finished earlier than that).
--
-- Locks: command rows that nobody else holds. Index: the key (there is none on finished_at, which a settle
-- changes; ids and ages run together); the keys of batch and process.
WITH seen AS MATERIALIZED (
    SELECT id, status, created_at, finished_at
      FROM commandbus.command
     WHERE id > %(after_id)s
     ORDER BY id
     LIMIT %(bite)s
), old AS MATERIALIZED (
    SELECT c.id
      FROM commandbus.command c
     WHERE c.id IN (SELECT id FROM seen
                     WHERE status OPERATOR(pg_catalog.=) ANY ('{COMPLETED,FAILED,CANCELED}')
                       AND (finished_at < pg_catalog.now() - pg_catalog.make_interval(secs => %(age)s::float8)
                            OR id <= %(through_id)s::bigint))
       AND NOT EXISTS (SELECT FROM commandbus.batch b WHERE b.id = c.batch AND b.finished_at IS NULL)
       AND NOT EXISTS (SELECT FROM commandbus.process p
                        WHERE p.id = c.process
                          AND (p.finished_at IS NULL
                               OR p.finished_at >= pg_catalog.now()
                                                   - pg_catalog.make_interval(secs => %(age)s::float8)))
       FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM commandbus.command WHERE id IN (SELECT id FROM old) RETURNING id
), attempts AS (
    DELETE FROM commandbus.attempt WHERE command IN (SELECT id FROM old)
), actions AS (
    DELETE FROM commandbus.operator_action WHERE command IN (SELECT id FROM old)
)
SELECT (SELECT pg_catalog.count(*) FROM gone), (SELECT pg_catalog.max(id) FROM seen),
       (SELECT pg_catalog.count(*) FROM seen),
       (SELECT pg_catalog.bool_and(id > %(through_id)s
                                   AND COALESCE(created_at > pg_catalog.now()
                                                - pg_catalog.make_interval(secs => %(age)s::float8), true))
          FROM seen)
