-- Settles attempts for good: the command is COMPLETED, FAILED, CANCELED or in the troubleshooting queue. Returns the
-- rows that were NOT settled: `refused` (the fence is gone: another worker settled or claimed it) or `busy` (another
-- transaction has locked the queue row: try again).
--
-- If members of batches or processes are among them, commands/settle_batches_and_processes.sql is inserted in the middle.
--
-- Fence: the queue row (msg_id) with this read_ct, still held by this worker, and of this command. The command is
-- compared because after a failover that lost commits, another message may have the same msg_id. Another command may then
-- have the same id, too. So if the worker has connected again since it claimed the command, `b` says when the command was
-- sent. A settlement updates exactly its command row, or changes nothing. Locks: queue rows in key order, then command
-- rows, then process rows. Indexes: the queue's key, the command's key. Two row writes for a completion: the queue row is
-- deleted, the command row is updated in place (HOT: no index contains a column that changes here). The queue row is
-- deleted by its key, not by its ctid: a renewal that commits between our snapshot and our lock has moved the row, and a
-- scan by the new ctid would not see it.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(m bigint, r integer, c bigint, s text, n integer, t float8, v json, e json, b float8, p json)
), held AS MATERIALIZED (
    SELECT msg_id, read_ct, message ->> 'command'::text AS command, headers ? 'cancel'::text AS is_canceled
      FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT m FROM input))
       AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
       FOR UPDATE {locking}
), fenced AS MATERIALIZED (
    SELECT i.* FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct AND i.c::text = h.command
     WHERE NOT h.is_canceled OR i.s IN ('COMPLETED', 'CANCELED')
), settled AS (
    UPDATE commandbus.command c
       SET status = f.s::commandbus.command_status, result = f.v, attempt = f.n, worker = %(worker)s,
           started_at = pg_catalog.to_timestamp(f.t),
           finished_at = CASE WHEN f.s <> 'IN_TROUBLESHOOTING_QUEUE' THEN pg_catalog.clock_timestamp() END,
           spans = CASE WHEN f.s = 'COMPLETED' THEN f.p END
      FROM fenced f
     WHERE c.id = f.c AND c.msg_id = f.m AND (f.b IS NULL OR pg_catalog.date_part('epoch', c.created_at) = f.b)
    RETURNING f.m, f.r, f.s, c.batch, c.process
{groups}), gone AS (
    DELETE FROM pgmq.{queue} WHERE msg_id = ANY (ARRAY(SELECT m FROM settled))
), failed AS (
    INSERT INTO commandbus.attempt (command, number, verdict, worker, started_at, error_type, error_code, error,
                                    details, traceback, rung, autopsy, duration_ms, spans, fingerprint, own_frame)
    SELECT c, n, e ->> 'verdict'::text, %(worker)s, pg_catalog.to_timestamp(t), e ->> 'error_type'::text,
           e ->> 'error_code'::text, e ->> 'error'::text, e -> 'details'::text, e ->> 'traceback'::text, e ->> 'rung'::text,
           e -> 'autopsy'::text, (e ->> 'duration_ms'::text)::bigint, p,
           e ->> 'fingerprint'::text, e ->> 'own_frame'::text
      FROM fenced
     WHERE e IS NOT NULL AND m = ANY (ARRAY(SELECT m FROM settled))
), troubled AS (
    INSERT INTO commandbus.tsq (command, domain, command_type, attempt, error_type, error_code, error, fingerprint, own_frame)
    SELECT c, %(domain)s, e ->> 'command_type'::text, n, e ->> 'error_type'::text, e ->> 'error_code'::text,
           e ->> 'error'::text, e ->> 'fingerprint'::text, e ->> 'own_frame'::text
      FROM fenced
     WHERE s = 'IN_TROUBLESHOOTING_QUEUE' AND m = ANY (ARRAY(SELECT m FROM settled))
)
SELECT m, r, CASE WHEN EXISTS (SELECT FROM fenced f WHERE f.m = i.m AND f.r = i.r) THEN 'refused' ELSE COALESCE((SELECT CASE WHEN EXISTS (SELECT FROM held h WHERE h.msg_id = q.msg_id AND h.is_canceled)
                                     THEN 'canceled' ELSE 'busy' END
                         FROM pgmq.{queue} q
                        WHERE q.msg_id = i.m AND q.read_ct = i.r
                          AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
                          AND q.message ->> 'command'::text = i.c::text), 'refused') END
  FROM input i
 WHERE NOT EXISTS (SELECT FROM settled s WHERE s.m = i.m AND s.r = i.r)
