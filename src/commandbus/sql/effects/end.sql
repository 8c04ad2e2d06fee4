-- Writes how effects ended: DONE with a receipt, NOT_DONE, or UNCERTAIN. Returns for each input: 'held', 'busy' or 'lost';
-- whether it was written; and the state and the attempt that the row had before.
--
-- `a`: the attempt whose intent it is; if another attempt has taken the effect over, nothing is written. `l`: what an attempt
-- says about its own call is written even if it has lost its command, because it is true all the same.
--
-- Locks: queue rows, SKIP LOCKED, then rows of effect. Indexes: the keys.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(i integer, m bigint, r integer, c bigint, n integer, name text, a integer, state text, receipt json, note text,
             l boolean)
), {fence}, ended AS (
    UPDATE commandbus.effect e
       SET state = x.state, receipt = x.receipt, note = x.note, ended_at = pg_catalog.clock_timestamp()
      FROM asked x
     WHERE e.command = x.c AND e.name = x.name AND e.attempt = x.a AND e.state IN ('INTENT', 'UNCERTAIN')
       AND (x.answer = 'held' OR (x.l AND x.answer = 'lost' AND e.worker = %(worker)s::text))
    RETURNING e.command, e.name
)
SELECT x.i, x.answer, (x.c, x.name) IN (SELECT command, name FROM ended), e.state, e.attempt
  FROM asked x
  LEFT JOIN LATERAL (
       SELECT f.state, f.attempt FROM commandbus.effect f WHERE f.command = x.c AND f.name = x.name OFFSET 0) e ON true
