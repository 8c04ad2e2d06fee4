-- Makes parked commands visible, and tells the workers of their domain. They come before what was sent after them.
-- Locks: queue rows, which the caller has locked. Index: the queue's key.
WITH woken AS (
    UPDATE pgmq.{queue} q
       SET vt = least(now(), x.since)
      FROM unnest(%(msg_ids)s::bigint[], %(since)s::timestamptz[]) AS x(msg_id, since)
     WHERE q.msg_id = x.msg_id AND q.headers IS NULL
    RETURNING q.msg_id
)
SELECT count(*), pg_notify('commandbus_' || %(domain)s, '0') FROM woken
