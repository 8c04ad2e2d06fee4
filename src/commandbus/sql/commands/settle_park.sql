-- Settles attempts whose limit has no permit for them: parked, not charged. Returns what was not settled, as
-- commands/settle_final.sql does, under the same fence.
--
-- The holder is cleared, and the row becomes visible in ten years, or when its turn comes. A command keeps its position,
-- because the order is that in which commands were sent. Its longest wait counts from when it was first parked.
-- Locks: queue rows in key order, then command rows, then rows of parked. Indexes: the keys, attempt_pkey.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(m bigint, r integer, c bigint, n integer, t float8, y text, l text, u float8, o text, e json, b float8, p json)
), held AS MATERIALIZED (
    SELECT msg_id, read_ct, message ->> 'command'::text AS command, headers ? 'cancel'::text AS is_canceled
      FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT m FROM input))
       AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
     ORDER BY msg_id
       FOR UPDATE {locking}
), fenced AS MATERIALIZED (
    SELECT i.* FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct AND i.c::text = h.command
     WHERE NOT h.is_canceled
), waived AS (
    UPDATE commandbus.command c SET waived = c.waived + 1
      FROM fenced f
     WHERE c.id = f.c AND c.msg_id = f.m AND (f.b IS NULL OR pg_catalog.date_part('epoch', c.created_at) = f.b)
    RETURNING c.id, c.attempt_base, f.m, f.r,
              c.created_at + {turn_for c.priority} AS turn
), retimed AS (
    UPDATE pgmq.{queue} q
       SET vt = pg_catalog.now() + interval '10 years' + {own_shift}, headers = NULL
     WHERE q.msg_id = ANY (ARRAY(SELECT m FROM waived))
), noted AS (
    INSERT INTO commandbus.attempt (command, number, verdict, worker, started_at, error_type, error_code, error, details,
                                    traceback, duration_ms, limit_name, spans)
    SELECT c, n, 'PARKED', %(worker)s, pg_catalog.to_timestamp(t), e ->> 'error_type'::text,
           e ->> 'error_code'::text, e ->> 'error'::text,
           e -> 'details'::text, e ->> 'traceback'::text, (e ->> 'duration_ms'::text)::bigint, l, p
      FROM fenced
     WHERE m = ANY (ARRAY(SELECT m FROM waived))
), parked AS (
    INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since, until, first_parked_at,
                                   note)
    SELECT %(domain)s, f.y, f.m, f.c, 'limit', f.l, w.turn, pg_catalog.to_timestamp(f.u),
           COALESCE(CASE WHEN f.r > 1 THEN (
               SELECT pg_catalog.min(finished_at) FROM commandbus.attempt a
                WHERE a.command = f.c AND a.number > w.attempt_base AND a.verdict = 'PARKED'
                  AND pg_catalog.left(a.error_code, 5) IN ('LIMIT', 'RATE_')) END, pg_catalog.now()),
           f.o
      FROM fenced f JOIN waived w ON w.id = f.c
     ORDER BY f.m
    ON CONFLICT (domain, msg_id) DO UPDATE
       SET reason = excluded.reason, limit_name = excluded.limit_name, since = excluded.since, until = excluded.until,
           first_parked_at = excluded.first_parked_at, give_up_at = NULL, note = excluded.note, woken_at = NULL,
           token = NULL, parked_at = pg_catalog.now()
)
SELECT m, r, CASE WHEN EXISTS (SELECT FROM fenced f WHERE f.m = i.m AND f.r = i.r) THEN 'refused' ELSE COALESCE((SELECT CASE WHEN EXISTS (SELECT FROM held h WHERE h.msg_id = q.msg_id AND h.is_canceled)
                                     THEN 'canceled' ELSE 'busy' END
                         FROM pgmq.{queue} q
                        WHERE q.msg_id = i.m AND q.read_ct = i.r
                          AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
                          AND q.message ->> 'command'::text = i.c::text), 'refused') END
  FROM input i
 WHERE NOT EXISTS (SELECT FROM waived w WHERE w.m = i.m AND w.r = i.r)
