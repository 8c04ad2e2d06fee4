-- Wakes a bite of what a pause or a breaker (`reason`) had parked of one command type, after a given seq, and the workers of
-- the domain. Nothing where it is paused or its breaker not closed by now. Returns how many were woken, and the last seq
-- that was looked at if there may be more.
--
-- One at a time for each type, by an advisory lock: whoever does not get it leaves the work to who has it. A parked row
-- without a message that waits is removed: nobody else would.
-- Locks: queue rows in key order, those that nobody else holds, then their parked rows (commands/cancel.sql takes them in this order
-- too). A message that waits becomes visible in years: one that somebody else has woken since our snapshot is left alone.
-- Indexes: parked_reason, in its order, and the queue's key. (Were the type given by `=`, or the end of its range, the
-- planner might read and sort all that is parked: it does not know how much that is just now. So the end is compared
-- outside. It would do the same where it takes a bite for most of what is parked, so the bite is no plain number.)
-- Parked rows go by ctid: nobody moves one while its message waits. By `seq`, where ANALYZE had found dead rows only, the
-- planner took parked_reason for as good as the key, and read all of it for each row.
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
