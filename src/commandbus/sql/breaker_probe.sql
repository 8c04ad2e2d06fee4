-- Lets the command that has been parked longest by a breaker go, as its probe; no row if none is parked.
-- Locks: its queue row (one that somebody is cancelling is passed over), then its parked row. Indexes: parked_reason, the
-- queue's key.
WITH chosen AS MATERIALIZED (
    SELECT p.seq, p.command, q.msg_id
      FROM commandbus.parked p JOIN pgmq.{queue} q ON q.msg_id = p.msg_id
     WHERE p.reason = 'breaker' AND p.domain = %(domain)s AND p.command_type = %(type)s
     ORDER BY p.seq
     LIMIT 1
       FOR UPDATE OF q SKIP LOCKED
), freed AS (
    DELETE FROM commandbus.parked WHERE seq = (SELECT seq FROM chosen)
), woken AS (
    UPDATE pgmq.{queue} SET vt = pg_catalog.now() WHERE msg_id = (SELECT msg_id FROM chosen)
)
SELECT command, pg_catalog.pg_notify('commandbus_' || %(domain)s, '0') FROM chosen
