-- Removes finished batches of a bite that are older than the age (a day, where only a count is kept) and have nothing
-- left: no members, and nothing to fold. Answers how many went, how many were looked at, and the last id of those.
--
-- Locks: batch rows that nobody else holds. Indexes: the key; command_batch, process_batch, batch_delta_batch.
WITH seen AS MATERIALIZED (
    SELECT id FROM commandbus.batch WHERE id > %(after_id)s ORDER BY id LIMIT %(bite)s
), old AS MATERIALIZED (
    SELECT b.id
      FROM commandbus.batch b
     WHERE b.id IN (SELECT id FROM seen)
       AND b.finished_at < pg_catalog.now() - pg_catalog.make_interval(secs => COALESCE(%(age)s::float8, 86400))
       AND NOT EXISTS (SELECT FROM commandbus.command c WHERE c.batch = b.id)
       AND NOT EXISTS (SELECT FROM commandbus.process p WHERE p.batch = b.id)
       AND NOT EXISTS (SELECT FROM commandbus.batch_delta d WHERE d.batch = b.id)
       FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM commandbus.batch WHERE id IN (SELECT id FROM old) RETURNING id
)
SELECT (SELECT pg_catalog.count(*) FROM gone), (SELECT pg_catalog.count(*) FROM seen),
       (SELECT pg_catalog.max(id) FROM seen)
