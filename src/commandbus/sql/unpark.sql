-- Wakes what a pause or a breaker (`reason`) had parked of one command type, and the workers of the domain.
-- Locks: queue rows in key order, then their parked rows (cancel.sql takes them in this order too).
-- Indexes: parked_reason, the queue's key.
WITH waiting AS MATERIALIZED (
    SELECT msg_id FROM commandbus.parked
     WHERE reason = %(reason)s AND domain = %(domain)s AND command_type = %(type)s
), held AS MATERIALIZED (
    SELECT msg_id FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM waiting))
     ORDER BY msg_id
       FOR UPDATE
), freed AS (
    DELETE FROM commandbus.parked
     WHERE domain = %(domain)s AND msg_id IN (SELECT msg_id FROM held) AND reason = %(reason)s
), woken AS (
    UPDATE pgmq.{queue} SET vt = pg_catalog.now() WHERE msg_id IN (SELECT msg_id FROM held) RETURNING msg_id
)
SELECT (SELECT pg_catalog.count(*) FROM woken), pg_catalog.pg_notify('commandbus_' || %(domain)s, '0')
