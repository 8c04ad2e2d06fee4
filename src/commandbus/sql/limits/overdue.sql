-- Wakes commands that have waited for a limit as long as they may, while no call to the API succeeded. The worker that
-- claims such a command moves it to the troubleshooting queue.
-- Locks: queue rows in key order, then rows of parked. Indexes: parked_waiting, the queue's key; limits is small.
WITH overdue AS MATERIALIZED (
    SELECT w.seq, w.msg_id
      FROM commandbus.limits l
     CROSS JOIN LATERAL (
           SELECT p.seq, p.msg_id FROM commandbus.parked p
            WHERE p.limit_name = l.name AND p.woken_at IS NULL AND p.domain <> '' AND p.domain = %(domain)s
              AND p.first_parked_at <= pg_catalog.now() - pg_catalog.make_interval(secs => l.max_wait) AND {claimable}
            ORDER BY p.first_parked_at LIMIT 500) w
     WHERE greatest(l.good_at, l.tended_since) <= pg_catalog.now() - pg_catalog.make_interval(secs => l.max_wait)
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
    UPDATE pgmq.{queue} SET vt = pg_catalog.now() + {own_shift} WHERE msg_id IN (SELECT msg_id FROM held) RETURNING msg_id
)
SELECT pg_catalog.count(*), pg_catalog.pg_notify('commandbus_' || %(domain)s, '0') FROM woken
