-- Wakes a bite of the commands of one type that a pause or a breaker (`reason`) had parked, after a given seq, and notifies
-- the workers of the domain. Does nothing if the type is paused again or its breaker is not closed. Returns how many were
-- woken and, if there may be more, the last seq that was looked at.
--
-- An advisory lock lets one session at a time do this for a type; other sessions leave the work to it. A parked row whose
-- message does not wait any more is removed, because nothing else removes it. The attempt row that says PARKED gets the
-- moment at which the wait ended (attempt.retry_at): one row write for each command.
-- Locks: queue rows in key order that no other transaction has locked, then their parked rows (commands/cancel.sql uses the
-- same order). A waiting message becomes visible in years. So a message that becomes visible earlier was woken since our
-- snapshot, and is left alone.
-- Indexes: parked_reason, in its order, the queue's key, and attempt's key. With `=` on the type, or with the end of its range, the
-- planner might read and sort all parked rows, because it does not know how many there are just now. So the end of the
-- range is compared outside. It would do the same if it expected a bite to be most of the parked rows, so the bite is not a
-- plain number.
-- Parked rows are deleted by ctid, because nothing moves such a row while its message waits. With `seq`, after an ANALYZE
-- that had found only dead rows, the planner preferred parked_reason to the key and read all of it for each row.
WITH turn AS MATERIALIZED (
    SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(
               pg_catalog.concat_ws(' ', 'commandbus unpark', %(reason)s::text, %(domain)s::text, %(type)s::text), 0::bigint))
           AND NOT EXISTS (SELECT FROM commandbus.pause
                            WHERE domain = %(domain)s AND command_type = %(type)s AND %(reason)s::text = 'pause'::text)
           AND NOT EXISTS (SELECT FROM commandbus.breaker
                            WHERE domain = %(domain)s AND command_type = %(type)s AND state <> 'CLOSED'
                              AND %(reason)s::text = 'breaker'::text) AS is_ours
), waiting AS MATERIALIZED (
    SELECT seq, msg_id, command, place
      FROM (SELECT seq, msg_id, command, reason, domain, command_type, ctid AS place
              FROM commandbus.parked
             WHERE (reason, domain, command_type, seq)
                   > (%(reason)s::text, %(domain)s::text, %(type)s::text, %(after)s::bigint)
               AND (SELECT is_ours FROM turn)
             ORDER BY reason, domain, command_type, seq
             LIMIT (SELECT %(bite)s::bigint)) p
     WHERE reason = %(reason)s AND domain = %(domain)s AND command_type = %(type)s
), held AS MATERIALIZED (
    SELECT msg_id FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM waiting)) AND {due_at} > pg_catalog.now() + interval '1 year'
     ORDER BY msg_id
       FOR UPDATE SKIP LOCKED
), freed AS (
    DELETE FROM commandbus.parked
     WHERE ctid = ANY (ARRAY(
           SELECT w.place FROM waiting w
            WHERE w.msg_id IN (SELECT msg_id FROM held)
               OR NOT EXISTS (SELECT FROM pgmq.{queue} q
                               WHERE q.msg_id = w.msg_id AND {due_at} > pg_catalog.now() + interval '1 year')))
), woken AS (
    UPDATE pgmq.{queue} SET vt = pg_catalog.now() + {own_shift} WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM held)) RETURNING msg_id
), noted AS (
    UPDATE commandbus.attempt SET retry_at = pg_catalog.now()
     WHERE command = ANY (ARRAY(SELECT command FROM waiting WHERE msg_id IN (SELECT msg_id FROM held)))
       AND verdict = 'PARKED'::text AND retry_at IS NULL
)
SELECT (SELECT pg_catalog.count(*) FROM woken),
       (SELECT pg_catalog.max(seq) FROM waiting HAVING pg_catalog.count(*) = %(bite)s),
       CASE WHEN EXISTS (SELECT FROM held) THEN pg_catalog.pg_notify('commandbus_' || %(domain)s, '0') END
