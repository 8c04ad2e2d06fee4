-- The queue's side of some commands: when visible, how often read, by whom held, what it is parked for, who asked to
-- cancel it, and how far its handler says to be. Locks: none. Index: the queue's key.
SELECT q.msg_id, q.vt, q.read_ct, q.headers ->> 'held_by', q.headers ->> 'since', p.reason,
       (q.headers -> 'cancel')::text, (q.headers -> 'progress')::text
  FROM pgmq.{queue} q
  LEFT JOIN commandbus.parked p ON p.domain = %(domain)s AND p.msg_id = q.msg_id
 WHERE q.msg_id = ANY (%(msg_ids)s::bigint[])
