-- Events of applications. Purpose: an application writes what it knows of a command into that command's audit trail.
--
-- Compatible: yes
--
-- Locks: ACCESS EXCLUSIVE on the view for a moment. Programs of the schema before this one can go on; pruning by them removes
-- the events, too, because it is the same function.

-- One row per event. `rank` is its place in the trail: within the attempt that ran when it was written, or after it.
CREATE TABLE commandbus.audit_event (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    command  bigint NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    rank     integer NOT NULL,
    attempt  integer,
    event    text NOT NULL,
    details  json
);
CREATE INDEX audit_event_command ON commandbus.audit_event (command);

CREATE OR REPLACE VIEW commandbus.audit AS
    SELECT id AS command, created_at AS at, 10 AS rank, 'SENT'::text AS event, NULL::integer AS attempt,
           NULL::text AS worker,
           json_build_object('command_type', command_type, 'correlation_id', correlation_id,
                             'reply_to', reply_to) AS details
      FROM commandbus.command
    UNION ALL
    SELECT id, started_at, attempt * 100 + 20, 'RECEIVED', attempt, worker, NULL
      FROM commandbus.command c
     WHERE started_at IS NOT NULL AND status = 'COMPLETED' AND attempt IS NOT NULL
    UNION ALL
    SELECT id, finished_at, attempt * 100 + 40, 'COMPLETED', attempt, worker, NULL
      FROM commandbus.command c
     WHERE status = 'COMPLETED' AND attempt IS NOT NULL
    UNION ALL
    SELECT command, started_at, number * 100 + 20, 'RECEIVED', number, worker, NULL
      FROM commandbus.attempt
     WHERE started_at IS NOT NULL AND verdict NOT IN ('NOTE')
    UNION ALL
    SELECT command, finished_at, number * 100 + CASE verdict WHEN 'NOTE' THEN 45 ELSE 30 END,
           CASE verdict WHEN 'BUSINESS_RULE' THEN 'BUSINESS_RULE_FAILED'
                        WHEN 'CANCELED' THEN 'CANCELED'
                        WHEN 'GIVEN_BACK' THEN 'GIVEN_BACK'
                        WHEN 'WAIVED' THEN 'WAIVED'
                        WHEN 'PARKED' THEN 'PARKED'
                        WHEN 'NOTE' THEN 'NOTE'
                        ELSE 'FAILED' END,
           number, worker,
           json_build_object('verdict', verdict, 'error_type', error_type, 'error_code', error_code,
                             'error', error, 'details', details, 'rung', rung, 'duration_ms', duration_ms)
      FROM commandbus.attempt
     WHERE NOT (verdict = 'EXHAUSTED' AND started_at IS NULL)
    UNION ALL
    SELECT command, finished_at, number * 100 + 31, 'RETRY_SCHEDULED', number, worker,
           json_build_object('retry_at', retry_at)
      FROM commandbus.attempt
     WHERE verdict = 'RETRY'
    UNION ALL
    SELECT command, finished_at, number * 100 + 32, 'RETRY_EXHAUSTED', number, worker, NULL
      FROM commandbus.attempt
     WHERE verdict = 'EXHAUSTED'
    UNION ALL
    SELECT command, finished_at, number * 100 + 33, 'MOVED_TO_TSQ', number, worker,
           json_build_object('error_type', error_type, 'error_code', error_code, 'error', error)
      FROM commandbus.attempt
     WHERE verdict IN ('EXHAUSTED', 'PERMANENT', 'UNKNOWN_TYPE')
    UNION ALL
    SELECT command, performed_at, COALESCE(attempt * 100 + 25, attempt_base * 100 + 50), 'OPERATOR_' || action,
           attempt, NULL,
           json_build_object('operator', operator, 'reason', reason)
      FROM commandbus.operator_action
    UNION ALL
    SELECT command, at, rank, event, attempt, NULL, details
      FROM commandbus.audit_event;

-- Writes events of commands of one domain, for roles that may work on it. Answers the ids of the commands that exist, in no
-- order. A command that somebody holds is in an attempt: its number is attempt_base + read_ct.
--
-- Locks: none but the new rows. Indexes: command_domain_command_id_key, the queue's key.
CREATE FUNCTION commandbus.log_events(p_domain text, p_command_ids text[], p_events text[], p_details text[])
    RETURNS TABLE (command_id text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'UPDATE');
    IF to_regclass(format('pgmq.%I', 'q_' || p_domain || '__commands')) IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format($query$
        WITH named AS MATERIALIZED (
            SELECT c.id, c.command_id, x.event, x.details, x.place,
                   COALESCE(c.attempt, c.attempt_base + COALESCE(q.read_ct, 0)) AS number,
                   COALESCE(q.headers ? 'held_by', false) AS is_running
              FROM unnest($2, $3, $4) WITH ORDINALITY AS x(command_id, event, details, place)
             CROSS JOIN LATERAL (
                   SELECT * FROM commandbus.command k
                    WHERE k.domain = $1 AND k.command_id = x.command_id OFFSET 0) c
              LEFT JOIN pgmq.%I q ON q.msg_id = c.msg_id AND c.status = 'PENDING'
        ), logged AS (
            INSERT INTO commandbus.audit_event (command, rank, attempt, event, details)
            SELECT n.id, n.number * 100 + CASE WHEN n.is_running THEN 25 ELSE 60 END,
                   CASE WHEN n.is_running THEN n.number END, n.event, n.details::json
              FROM named n ORDER BY n.place
        )
        SELECT n.command_id FROM named n
        $query$, 'q_' || p_domain || '__commands')
        USING p_domain, p_command_ids, p_events, p_details;
END
$$;
REVOKE ALL ON FUNCTION commandbus.log_events FROM PUBLIC;

-- Removes a bite of finished commands and everything about them; those of batches and processes that are not finished,
-- and of processes that finished within the age, stay. Answers how many went, and the id up to which
-- was looked, so that the next bite goes on from there instead of walking over what stays; and whether all that
-- was looked at is too young, which ends the walk (what was sent later cannot have finished earlier than that).
--
-- Locks: command rows that nobody else holds. Index: the key (there is none on finished_at, which a settle
-- changes; ids and ages run together); the keys of batch and process.
CREATE OR REPLACE FUNCTION commandbus.prune_commands(p_after_id bigint, p_bite integer, p_through_id bigint, p_age float8)
    RETURNS TABLE (removed bigint, last_id bigint, seen bigint, all_young boolean)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_domains text[] := commandbus.callers_domains();
    v_least timestamptz := now() - make_interval(secs => commandbus.least_age());
    v_before timestamptz := now() - make_interval(secs => greatest(p_age, commandbus.least_age()));
BEGIN
    IF p_age IS NULL THEN
        v_before := NULL;
    END IF;
    RETURN QUERY
    WITH seen AS MATERIALIZED (
        SELECT c.id, c.status, c.created_at, c.finished_at, c.domain
          FROM commandbus.command c
         WHERE c.id > p_after_id
         ORDER BY c.id
         LIMIT p_bite
    ), old AS MATERIALIZED (
        SELECT c.id
          FROM commandbus.command c
         WHERE c.id IN (SELECT s.id FROM seen s
                         WHERE s.status IN ('COMPLETED', 'FAILED', 'CANCELED')
                           AND (s.finished_at < v_before OR s.id <= p_through_id)
                           AND s.finished_at <= v_least
                           AND (v_domains IS NULL OR s.domain = ANY (v_domains)))
           AND NOT EXISTS (SELECT FROM commandbus.batch b WHERE b.id = c.batch AND b.finished_at IS NULL)
           AND NOT EXISTS (SELECT FROM commandbus.process p
                            WHERE p.id = c.process AND (p.finished_at IS NULL OR p.finished_at >= v_before))
           FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM commandbus.command c WHERE c.id IN (SELECT o.id FROM old o) RETURNING c.id
    ), attempts AS (
        DELETE FROM commandbus.attempt a WHERE a.command IN (SELECT o.id FROM old o)
    ), actions AS (
        DELETE FROM commandbus.operator_action a WHERE a.command IN (SELECT o.id FROM old o)
    ), events AS (
        DELETE FROM commandbus.audit_event e WHERE e.command IN (SELECT o.id FROM old o)
    )
    SELECT (SELECT count(*) FROM gone), (SELECT max(s.id) FROM seen s), (SELECT count(*) FROM seen),
           (SELECT bool_and(s.id > p_through_id AND COALESCE(s.created_at > v_before, true)) FROM seen s);
END
$$;
