-- Writes the intents of effects, under the fences of the attempts that want to make the calls. Returns for each input: 'begun'
-- (the intent is written, and this attempt makes the call), 'found' (there is a row already, and nothing was written), 'busy'
-- or 'lost'; and the row that was there before.
--
-- `a`: take over the intent of attempt number `a`, because it is known that its call was not made.
-- `is_dead`: the supervisor, or the history, says that the process of that attempt is dead. `ended_ago`: how many seconds ago
-- that attempt ended, or wrote its intent if its end is not recorded.
--
-- Locks: queue rows, SKIP LOCKED, then rows of effect. Indexes: the keys.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(i integer, m bigint, r integer, c bigint, n integer, name text, key text, process text, a integer)
), {fence}, begun AS (
    INSERT INTO commandbus.effect AS e (command, name, key, attempt, worker, process)
    SELECT c, name, key, n, %(worker)s::text, process FROM held WHERE a IS NULL ORDER BY c, name
    ON CONFLICT (command, name) DO UPDATE
       SET state = 'INTENT', begun_at = excluded.begun_at, ended_at = NULL, attempt = excluded.attempt, calls = e.calls + 1,
           worker = excluded.worker, process = excluded.process, note = NULL, receipt = NULL
     WHERE e.state = 'NOT_DONE' AND e.key = excluded.key
    RETURNING command, name
), taken_over AS (
    UPDATE commandbus.effect e
       SET state = 'INTENT', begun_at = pg_catalog.clock_timestamp(), ended_at = NULL, attempt = h.n, calls = e.calls + 1,
           worker = %(worker)s::text, process = h.process, note = NULL
      FROM held h
     WHERE e.command = h.c AND e.name = h.name AND e.attempt = h.a AND e.state IN ('INTENT', 'UNCERTAIN')
    RETURNING e.command, e.name
)
SELECT x.i,
       CASE WHEN x.answer <> 'held' THEN x.answer
            WHEN (x.c, x.name) IN (SELECT command, name FROM begun UNION ALL SELECT command, name FROM taken_over) THEN 'begun'
            ELSE 'found' END,
       e.state, e.key, e.receipt::text, e.attempt, e.worker, e.process, e.begun_at, e.is_dead, e.ended_ago
  FROM asked x
  LEFT JOIN LATERAL (
       SELECT f.*,
              EXISTS (SELECT FROM commandbus.worker w WHERE w.id = f.worker AND w.died_at IS NOT NULL)
              OR EXISTS (SELECT FROM commandbus.attempt t
                          WHERE t.command = f.command AND t.number = f.attempt AND t.rung IN ('kill', 'crash')) AS is_dead,
              extract(epoch FROM pg_catalog.clock_timestamp() - greatest(f.begun_at, (
                  SELECT pg_catalog.max(t.finished_at) FROM commandbus.attempt t
                   WHERE t.command = f.command AND t.number = f.attempt)))::float8 AS ended_ago
         FROM commandbus.effect f
        WHERE f.command = x.c AND f.name = x.name
       OFFSET 0) e ON true
