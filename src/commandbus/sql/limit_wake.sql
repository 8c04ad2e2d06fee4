-- Makes parked commands visible, and tells the workers of their domain. They come before what was sent after them.
-- Locks: queue rows, which the caller has locked. Index: the queue's key, by an array as in limit_woken.sql.
WITH woken AS (
    UPDATE pgmq.{queue}
       SET vt = least(now(), (%(since)s::timestamptz[])[array_position(%(msg_ids)s::bigint[], msg_id)])
     WHERE msg_id = ANY (ARRAY(SELECT unnest(%(msg_ids)s::bigint[]))) AND headers IS NULL
    RETURNING msg_id
)
SELECT count(*), pg_notify('commandbus_' || %(domain)s, '0') FROM woken
