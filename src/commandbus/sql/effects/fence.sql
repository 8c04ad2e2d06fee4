-- A part of the statements that write under the fence of running attempts: which of the inputs are still held.
--
-- SKIP LOCKED: the writes of others must not wait for a queue row that another transaction has locked. Such an input is
-- neither held nor lost; the caller tries again. Locks: queue rows. Index: the queue's key.
fence AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct, q.message -> 'command'::text AS command
      FROM pgmq.{queue} q
     WHERE q.msg_id = ANY (ARRAY(SELECT m FROM input))
       AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
       FOR UPDATE SKIP LOCKED
), held AS MATERIALIZED (
    SELECT i.*
      FROM input i
      JOIN fence f ON f.msg_id = i.m AND f.read_ct = i.r AND f.command = pg_catalog.to_jsonb(i.c)
), asked AS MATERIALIZED (
    SELECT i.*,
           CASE WHEN i.i IN (SELECT i FROM held) THEN 'held'
                WHEN EXISTS (SELECT FROM pgmq.{queue} q
                              WHERE q.msg_id = i.m AND q.read_ct = i.r
                                AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
                                AND q.message -> 'command'::text = pg_catalog.to_jsonb(i.c)) THEN 'busy'
                ELSE 'lost' END AS answer
      FROM input i
)
