-- Wakes commands that have waited for a limit as long as they may: who claims them sees that, and hands them to a person.
-- Locks: queue rows in key order, then rows of parked. Indexes: parked_give_up, the queue's key.
WITH overdue AS MATERIALIZED (
    SELECT seq, msg_id FROM commandbus.parked
     WHERE domain = %(domain)s AND give_up_at <= pg_catalog.now() AND woken_at IS NULL
     LIMIT 500
), held AS MATERIALIZED (
    SELECT msg_id FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM overdue)) AND headers IS NULL
     ORDER BY msg_id
       FOR UPDATE SKIP LOCKED
), noted AS (
    UPDATE commandbus.parked SET woken_at = pg_catalog.now()
     WHERE seq = ANY (ARRAY(SELECT seq FROM overdue WHERE msg_id IN (SELECT msg_id FROM held)))
), woken AS (
    UPDATE pgmq.{queue} SET vt = pg_catalog.now() WHERE msg_id IN (SELECT msg_id FROM held) RETURNING msg_id
)
SELECT pg_catalog.count(*), pg_catalog.pg_notify('commandbus_' || %(domain)s, '0') FROM woken
