-- Removes finished processes of a bite that are older than the age (a day, where only a count is kept) and have no
-- commands left, with their steps and stray replies. Answers how many went, how many were looked at, and the last id of
-- those.
--
-- Locks: process rows that nobody else holds. Indexes: the key; command_process, process_step's key, stray_reply_process.
WITH seen AS MATERIALIZED (
    SELECT id FROM commandbus.process WHERE id > %(after_id)s ORDER BY id LIMIT %(bite)s
), old AS MATERIALIZED (
    SELECT p.id
      FROM commandbus.process p
     WHERE p.id IN (SELECT id FROM seen)
       AND p.finished_at < pg_catalog.now() - pg_catalog.make_interval(secs => COALESCE(%(age)s::float8, 86400))
       AND NOT EXISTS (SELECT FROM commandbus.command c WHERE c.process = p.id)
       FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM commandbus.process WHERE id IN (SELECT id FROM old) RETURNING id
), steps AS (
    DELETE FROM commandbus.process_step WHERE process IN (SELECT id FROM old)
), strays AS (
    DELETE FROM commandbus.stray_reply WHERE process IN (SELECT id FROM old)
)
SELECT (SELECT pg_catalog.count(*) FROM gone), (SELECT pg_catalog.count(*) FROM seen),
       (SELECT pg_catalog.max(id) FROM seen)
