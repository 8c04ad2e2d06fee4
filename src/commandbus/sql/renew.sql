-- Extends the leases that a worker still holds; returns those it has lost.
--
-- SKIP LOCKED: a row that a completing transaction holds must not starve the others; it is not lost, and is
-- renewed next time if it is still there. Never shortens a lease. Locks: queue rows. Index: the queue's key.
WITH input AS MATERIALIZED (
    SELECT * FROM unnest(%(msg_ids)s::bigint[], %(read_cts)s::integer[]) AS x(m, r)
), held AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct
      FROM pgmq.{queue} q
     WHERE q.msg_id = ANY (%(msg_ids)s::bigint[]) AND q.headers ->> 'held_by' = %(worker)s
       FOR UPDATE SKIP LOCKED
), renewed AS (
    UPDATE pgmq.{queue}
       SET vt = greatest(vt, now() + make_interval(secs => %(lease)s))
     WHERE msg_id = ANY (ARRAY(SELECT h.msg_id FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct))
)
SELECT m, r
  FROM input i
 WHERE NOT EXISTS (SELECT FROM pgmq.{queue} q
                    WHERE q.msg_id = i.m AND q.read_ct = i.r AND q.headers ->> 'held_by' = %(worker)s)
