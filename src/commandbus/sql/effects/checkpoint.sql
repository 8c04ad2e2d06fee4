-- Stores the checkpoints of running attempts, one per command, under their fences. Returns for each input: 'held' (it is
-- stored), 'busy' or 'lost'.
--
-- Locks: queue rows, SKIP LOCKED, then rows of checkpoint. Indexes: the keys.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(i integer, m bigint, r integer, c bigint, n integer, v json)
), {fence}, stored AS (
    INSERT INTO commandbus.checkpoint AS k (command, attempt, value)
    SELECT c, n, v FROM held ORDER BY c
    ON CONFLICT (command) DO UPDATE
       SET at = excluded.at, attempt = excluded.attempt, value = excluded.value
)
SELECT i, answer FROM asked
