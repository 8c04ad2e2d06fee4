-- Makes parked commands visible, and notifies the workers of their domain. They come before commands that were sent
-- later.
-- Locks: queue rows, which the caller has locked. Index: the queue's key, by an array as in limits/woken.sql.
WITH woken AS (
    UPDATE pgmq.{queue}
       SET vt = least(pg_catalog.now(), {due_at (%(since)s::timestamptz[])[pg_catalog.array_position(
                                                    %(msg_ids)s::bigint[], msg_id)]}) + {own_shift}
     WHERE msg_id = ANY (ARRAY(SELECT pg_catalog.unnest(%(msg_ids)s::bigint[]))) AND headers IS NULL
    RETURNING msg_id
)
SELECT pg_catalog.count(*), pg_catalog.pg_notify('commandbus_' || %(domain)s, '0') FROM woken
