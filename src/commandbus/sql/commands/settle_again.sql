-- Settles attempts whose command is to be tried again: after a failure (with an attempt row), waived, or snoozed (`z`).
-- With `g`, the attempt was part of a chunk that failed, and the command runs by itself from now on.
-- Returns the rows that were not settled, as commands/settle_final.sql does. The fence is the same as there. The
-- command row is looked up by its key in a subquery that cannot become a join, because a join might scan the table.
--
-- The holder is cleared, so an abandoned attempt cannot settle while its command waits for the retry. Locks: queue rows in
-- key order, then command rows (of waived attempts, and if the marks of trouble change). Indexes: the queue's key, the
-- command's key, the attempt's key. A command that is given back again and again for one reason (an outage of hours)
-- gets history rows less and less often: after ten attempts, the next row comes only after half as many more. So there are
-- dozens of rows, not thousands.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(m bigint, r integer, c bigint, n integer, t float8, d float8, w integer, k boolean, x smallint, q boolean,
             a boolean, e json, z boolean, b float8, g boolean, p json)
), held AS MATERIALIZED (
    SELECT msg_id, read_ct, message ->> 'command'::text AS command, headers ? 'cancel'::text AS is_canceled
      FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT m FROM input))
       AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
       FOR UPDATE {locking}
), matched AS MATERIALIZED (
    SELECT i.* FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct AND i.c::text = h.command
     WHERE NOT h.is_canceled
), fenced AS MATERIALIZED (
    SELECT * FROM matched i
     WHERE (SELECT CASE WHEN i.b IS NULL OR pg_catalog.date_part('epoch', c.created_at) = i.b THEN c.msg_id END
              FROM commandbus.command c WHERE c.id = i.c) = i.m
), retimed AS (
    UPDATE pgmq.{queue} q
       SET vt = pg_catalog.now() + pg_catalog.make_interval(secs => f.d) + {own_shift}, headers = NULL
      FROM fenced f
     WHERE q.msg_id = f.m
), waived AS (
    UPDATE commandbus.command c
       SET waived = c.waived + f.w, suspect = CASE WHEN f.k THEN f.x ELSE c.suspect END,
           quarantine = CASE WHEN f.k THEN f.q ELSE c.quarantine END, alone = CASE WHEN f.k THEN f.a ELSE c.alone END,
           single = CASE WHEN f.g THEN true ELSE c.single END,
           snoozes = CASE WHEN f.z THEN COALESCE(c.snoozes, 0) + 1 ELSE c.snoozes END,
           snoozed_at = CASE WHEN f.z THEN COALESCE(c.snoozed_at, pg_catalog.now()) ELSE c.snoozed_at END
      FROM fenced f
     WHERE c.id = f.c AND c.msg_id = f.m AND (f.w <> 0 OR f.k)
), failed AS (
    INSERT INTO commandbus.attempt (command, number, verdict, worker, started_at, retry_at, error_type,
                                    error_code, error, details, traceback, rung, autopsy, duration_ms, spans, fingerprint,
                                    own_frame)
    SELECT c, n, e ->> 'verdict'::text, %(worker)s, pg_catalog.to_timestamp(t),
           pg_catalog.now() + pg_catalog.make_interval(secs => d),
           e ->> 'error_type'::text, e ->> 'error_code'::text, e ->> 'error'::text, e -> 'details'::text,
           e ->> 'traceback'::text, e ->> 'rung'::text, e -> 'autopsy'::text, (e ->> 'duration_ms'::text)::bigint, p,
           e ->> 'fingerprint'::text, e ->> 'own_frame'::text
      FROM fenced f
     WHERE CASE WHEN n <= 10 OR e ->> 'verdict'::text <> 'GIVEN_BACK'::text THEN true
                ELSE NOT EXISTS (SELECT FROM commandbus.attempt a
                                  WHERE a.command = f.c AND a.number >= f.n * 2 / 3 AND a.verdict = 'GIVEN_BACK'::text
                                    AND a.error = f.e ->> 'error'::text) END
)
SELECT m, r, CASE WHEN EXISTS (SELECT FROM held h WHERE h.msg_id = i.m AND h.read_ct = i.r AND NOT h.is_canceled)
                  THEN 'refused' ELSE COALESCE((SELECT CASE WHEN EXISTS (SELECT FROM held h WHERE h.msg_id = q.msg_id AND h.is_canceled)
                                     THEN 'canceled' ELSE 'busy' END
                         FROM pgmq.{queue} q
                        WHERE q.msg_id = i.m AND q.read_ct = i.r
                          AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
                          AND q.message ->> 'command'::text = i.c::text), 'refused') END
  FROM input i
 WHERE NOT EXISTS (SELECT FROM fenced f WHERE f.m = i.m AND f.r = i.r)
