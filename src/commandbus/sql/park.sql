-- Parks claimed commands of paused types: no slot, no lease, no charge. Those whose pause was lifted meanwhile
-- go back to the queue instead. Those that somebody asked to cancel since they were claimed are left held and
-- returned: clearing their holder would lose the request.
--
-- Locks: pause rows (FOR KEY SHARE: a resume waits for us and then finds what we parked), queue rows, command
-- rows, in this order. It waits for a queue row that another claimer looks at: one that was skipped would stay leased
-- to a worker that does not know of it. Index: the queue's key.
WITH paused AS MATERIALIZED (
    SELECT command_type FROM commandbus.pause WHERE domain = %(domain)s FOR KEY SHARE
), input AS MATERIALIZED (
    SELECT * FROM json_to_recordset(%(rows)s::json) AS x(m bigint, r integer, c bigint, n integer, t text)
), held AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct, q.headers -> 'cancel' AS cancel
      FROM pgmq.{queue} q
     WHERE q.msg_id = ANY (ARRAY(SELECT m FROM input)) AND q.headers ->> 'held_by' = %(worker)s
     ORDER BY q.msg_id
       FOR UPDATE
), fenced AS MATERIALIZED (
    SELECT i.*, i.t IN (SELECT command_type FROM paused) AS parks
      FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct
     WHERE h.cancel IS NULL
), retimed AS (
    UPDATE pgmq.{queue} q
       SET headers = NULL, vt = CASE WHEN f.parks THEN now() + interval '10 years' ELSE now() END
      FROM fenced f
     WHERE q.msg_id = f.m
), waived AS (
    UPDATE commandbus.command c SET waived = c.waived + 1 FROM fenced f WHERE c.id = f.c
), noted AS (
    INSERT INTO commandbus.attempt (command, number, verdict, worker, error_code, error)
    SELECT c, n, CASE WHEN parks THEN 'PARKED' ELSE 'GIVEN_BACK' END, %(worker)s, 'PAUSED',
           CASE WHEN parks THEN 'its command type is paused' ELSE 'its command type was paused a moment ago' END
      FROM fenced
), parked AS (
    INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason)
    SELECT %(domain)s, t, m, c, 'pause' FROM fenced WHERE parks ORDER BY m
)
SELECT h.msg_id, h.cancel ->> 'by', h.cancel ->> 'reason'
  FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct
 WHERE h.cancel IS NOT NULL
