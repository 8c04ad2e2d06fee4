-- Wakes a bite of the commands of one type that a pause or a breaker (`reason`) had parked, after a given seq, and the
-- workers of the domain. Does nothing if the type is paused or its breaker is not closed by now. Returns how many were
-- woken, and the last seq that was looked at if there may be more.
--
-- An advisory lock lets one session at a time do this for a type; the others leave the work to it. A parked row whose
-- message does not wait any more is removed, because nobody else would do that.
-- Locks: queue rows in key order, those that nobody else holds, then their parked rows (commands/cancel.sql uses the
-- same order). A waiting message becomes visible in years, so one that somebody else has woken since our snapshot is
-- left alone.
-- Indexes: parked_reason, in its order, and the queue's key. With `=` on the type, or with the end of its range, the
-- planner might read and sort everything that is parked, because it does not know how much that is just now. So the end
-- is compared outside. The planner would do the same if it took a bite for most of what is parked, so the bite is not a
-- plain number.
-- Parked rows are deleted by ctid, because nobody moves one while its message waits. By `seq`, when ANALYZE had found
-- only dead rows, the planner took parked_reason for as good as the key and read all of it for each row.
WITH turn AS MATERIALIZED (
    SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(
               pg_catalog.concat_ws(' ', 'commandbus unpark', %(reason)s::text, %(domain)s::text, %(type)s::text), 0::bigint))
           AND NOT EXISTS (SELECT FROM commandbus.pause
                            WHERE domain = %(domain)s AND command_type = %(type)s AND %(reason)s::text = 'pause'::text)
           AND NOT EXISTS (SELECT FROM commandbus.breaker
                            WHERE domain = %(domain)s AND command_type = %(type)s AND state <> 'CLOSED'
                              AND %(reason)s::text = 'breaker'::text) AS is_ours
), waiting AS MATERIALIZED (
    SELECT seq, msg_id, place
      FROM (SELECT seq, msg_id, reason, domain, command_type, ctid AS place
              FROM commandbus.parked
             WHERE (reason, domain, command_type, seq)
                   > (%(reason)s::text, %(domain)s::text, %(type)s::text, %(after)s::bigint)
               AND (SELECT is_ours FROM turn)
             ORDER BY reason, domain, command_type, seq
             LIMIT (SELECT %(bite)s::bigint)) p
     WHERE reason = %(reason)s AND domain = %(domain)s AND command_type = %(type)s
), held AS MATERIALIZED (
    SELECT msg_id FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM waiting)) AND vt > pg_catalog.now() + interval '1 year'
     ORDER BY msg_id
       FOR UPDATE SKIP LOCKED
), freed AS (
    DELETE FROM commandbus.parked
     WHERE ctid = ANY (ARRAY(
           SELECT w.place FROM waiting w
            WHERE w.msg_id IN (SELECT msg_id FROM held)
               OR NOT EXISTS (SELECT FROM pgmq.{queue} q
                               WHERE q.msg_id = w.msg_id AND q.vt > pg_catalog.now() + interval '1 year')))
), woken AS (
    UPDATE pgmq.{queue} SET vt = pg_catalog.now() WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM held)) RETURNING msg_id
)
SELECT (SELECT pg_catalog.count(*) FROM woken),
       (SELECT pg_catalog.max(seq) FROM waiting HAVING pg_catalog.count(*) = %(bite)s),
       CASE WHEN EXISTS (SELECT FROM held) THEN pg_catalog.pg_notify('commandbus_' || %(domain)s, '0') END
