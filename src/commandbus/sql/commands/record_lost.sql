-- Records the attempts of workers that vanished, and what that costs their commands (model/suspects.py). A claim has
-- found these attempts under "before" in the queue row's headers. Returns the messages that somebody asked to cancel since
-- this worker claimed them, and the command of each attempt that was recorded.
--
-- Locks: queue rows that this worker holds (only a renewal by the same worker writes them, too), then command rows, then
-- new attempt rows. Indexes: the queue's key, the command's key. Idempotent: a second run finds no "before".
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(m bigint, r integer, c bigint, n integer, w text, s timestamptz, e text)
), cleared AS (
    UPDATE pgmq.{queue}
       SET headers = headers - 'before'::text
     WHERE msg_id = ANY (ARRAY(SELECT m FROM input))
       AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
       AND headers ? 'before'::text
    RETURNING msg_id, read_ct, headers -> 'cancel'::text AS cancel
), marked AS (
    UPDATE commandbus.command c
       SET waived = i.v, suspect = i.x, alone = i.a
      FROM cleared q JOIN pg_catalog.json_to_recordset(%(marks)s::json)
               AS i(m bigint, r integer, c bigint, v integer, x smallint, a boolean) ON i.m = q.msg_id AND i.r = q.read_ct
     WHERE c.id = i.c
), lost AS (
    INSERT INTO commandbus.attempt (command, number, verdict, worker, started_at, error_type, error_code, error)
    SELECT i.c, i.n, 'LOST', i.w, i.s, 'WorkerLost', 'WORKER_LOST', i.e
      FROM cleared q JOIN input i ON i.m = q.msg_id AND i.r = q.read_ct
    ON CONFLICT DO NOTHING
    RETURNING command
)
SELECT msg_id, cancel ->> 'by'::text, cancel ->> 'reason'::text, NULL::bigint FROM cleared WHERE cancel IS NOT NULL
UNION ALL
SELECT NULL, NULL, NULL, command FROM lost
