-- Deletes timers that are not needed any more. A timer that a worker has just claimed stays: the worker will find that
-- the step has ended.
--
-- Locks: queue rows that nobody else holds, then command rows. Indexes: the keys.
WITH held AS MATERIALIZED (
    SELECT q.msg_id
      FROM pgmq.{queue} q
     WHERE q.msg_id IN (SELECT msg_id FROM commandbus.command
                         WHERE id = ANY (%(timers)s::bigint[]) AND status OPERATOR(pg_catalog.=) 'PENDING')
       AND NOT COALESCE(q.headers ? 'held_by'::text, false)
     ORDER BY q.msg_id
       FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pgmq.{queue} WHERE msg_id IN (SELECT msg_id FROM held)
    RETURNING (message ->> 'command'::text)::bigint AS command
), parked AS (
    DELETE FROM commandbus.parked WHERE command IN (SELECT command FROM gone)
)
SELECT commandbus.forget_timers(ARRAY(SELECT command FROM gone))
