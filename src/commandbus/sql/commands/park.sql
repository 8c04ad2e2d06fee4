-- Parks claimed commands whose type is paused, whose breaker is not closed, or for which their worker has no handler
-- (`k`). They take no slot and no lease, and are not charged. If the pause ended or the breaker closed meanwhile, a
-- command goes back to the queue instead. A command that somebody asked to cancel after the claim stays held and is
-- returned, because clearing its holder would lose the request.
--
-- If a limit has left a row in `parked`, it is overwritten: the command's turn at the limit is over. Only a command that
-- waits for a handler keeps that row: a worker with the handler takes the command soon, together with the reserved permit.
-- Locks: pause rows (FOR KEY SHARE: a resume waits for us and then finds the commands that we parked; breakers/hold.sql,
-- the statement before, has locked the breaker rows), queue rows, command rows, in this order. It waits for a queue row
-- that another claimer has locked. If it skipped the row, the row would stay leased to a worker that does not know about
-- it. Index: the queue's key.
WITH paused AS MATERIALIZED (
    SELECT command_type FROM commandbus.pause WHERE domain = %(domain)s FOR KEY SHARE
), input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(m bigint, r integer, c bigint, n integer, t text, b text, u timestamptz, k text)
), held AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct, q.message ->> 'command'::text AS command, q.headers -> 'cancel'::text AS cancel
      FROM pgmq.{queue} q
     WHERE q.msg_id = ANY (ARRAY(SELECT m FROM input))
       AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
     ORDER BY q.msg_id
       FOR UPDATE
), fenced AS MATERIALIZED (
    SELECT i.*, CASE WHEN i.t IN (SELECT command_type FROM paused) THEN 'pause'
                     WHEN i.b IS NOT NULL THEN 'breaker'
                     WHEN i.k IS NOT NULL THEN 'handler' END AS reason
      FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct AND i.c::text = h.command
     WHERE h.cancel IS NULL
), retimed AS (
    UPDATE pgmq.{queue} q
       SET headers = NULL, vt = pg_catalog.now() + {own_shift} + CASE WHEN f.reason IS NULL THEN interval '0'
                                                                       ELSE interval '10 years' END
      FROM fenced f
     WHERE q.msg_id = f.m
), waived AS (
    UPDATE commandbus.command c SET waived = c.waived + 1 FROM fenced f WHERE c.id = f.c AND c.msg_id = f.m
), noted AS (
    INSERT INTO commandbus.attempt (command, number, verdict, worker, error_code, error)
    SELECT c, n, CASE WHEN reason IS NULL THEN 'GIVEN_BACK' ELSE 'PARKED' END, %(worker)s,
           CASE reason WHEN 'pause' THEN 'PAUSED' WHEN 'breaker' THEN 'BREAKER_OPEN' WHEN 'handler' THEN 'NO_HANDLER'
                       ELSE 'GIVEN_BACK' END,
           CASE reason WHEN 'pause' THEN 'its command type is paused' WHEN 'breaker' THEN b
                       WHEN 'handler' THEN 'this worker has no handler for ' || %(domain)s || '/' || t
                       ELSE 'its command type was paused, or its breaker open, a moment ago' END
      FROM fenced
), parked AS (
    INSERT INTO commandbus.parked AS p (domain, command_type, msg_id, command, reason, until, note)
    SELECT %(domain)s, t, m, c, reason, CASE WHEN reason = 'breaker' THEN u END,
           CASE reason WHEN 'breaker' THEN b WHEN 'handler' THEN k END
      FROM fenced WHERE reason IS NOT NULL ORDER BY m
    ON CONFLICT (domain, msg_id) DO UPDATE
       SET reason = excluded.reason, until = excluded.until, note = excluded.note, parked_at = excluded.parked_at,
           limit_name = NULL, since = NULL, first_parked_at = NULL, give_up_at = NULL, woken_at = NULL,
           kept_limit = CASE WHEN excluded.reason = 'handler' THEN COALESCE(p.limit_name, p.kept_limit) END,
           token = CASE WHEN excluded.reason = 'handler' THEN p.token END
)
SELECT h.msg_id, h.cancel ->> 'by'::text, h.cancel ->> 'reason'::text
  FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct AND i.c::text = h.command
 WHERE h.cancel IS NOT NULL
