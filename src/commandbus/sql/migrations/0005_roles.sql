-- What roles may do beyond their grants. Purpose: off the hot path, functions do for a role what it may not do by itself.
--
-- Locks: DDL on new objects only. Each function runs with the rights of the role that migrated, under a search path
-- that nobody else can create in, and PUBLIC may not call it (model/roles.py grants it). A role belongs to a domain if it
-- has rights on that domain's queue: functions that take a domain ask for those rights, of the role that calls.

-- The role in whose name the session acts. Inside a function with its owner's rights current_user is the owner.
CREATE FUNCTION commandbus.caller() RETURNS name
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role')::name END
$$;

-- May the caller do this with the queue of a domain? Null if there is no such domain.
CREATE FUNCTION commandbus.caller_may(p_domain text, p_privilege text) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE p_privilege WHEN 'DELETE' THEN has_table_privilege(commandbus.caller(), queue, 'DELETE')
                            ELSE has_any_column_privilege(commandbus.caller(), queue, p_privilege) END
      FROM to_regclass(format('pgmq.%I', 'q_' || p_domain || '__commands')) AS queue
$$;

-- Refuses a caller to whom the domain does not belong. A domain that does not exist is nobody's: there is nothing to refuse.
CREATE FUNCTION commandbus.check_caller(p_domain text, p_privilege text) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT commandbus.caller_may(p_domain, p_privilege) THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for domain %s', p_domain);
    END IF;
END
$$;

-- Is this the same JSON? The order of keys is no difference; 1, 1.0 and true are three things.
CREATE FUNCTION commandbus.is_same_json(a json, b json) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN COALESCE(a::text, 'null') = COALESCE(b::text, 'null') THEN true
                ELSE COALESCE(a, 'null')::jsonb::text = COALESCE(b, 'null')::jsonb::text END
$$;

-- Compares commands with what is to be sent under their ids: `difference` names the first field that differs. It does not
-- show what the field holds. Index: command_domain_command_id_key.
CREATE FUNCTION commandbus.compare_commands(p_domain text, p_rows json)
    RETURNS TABLE (command_id text, id bigint, difference text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'INSERT');
    RETURN QUERY
    SELECT x.i, c.id,
           CASE WHEN c.command_type <> x.t THEN 'command_type'
                WHEN NOT commandbus.is_same_json(c.data, x.d) THEN 'data'
                WHEN c.correlation_id IS DISTINCT FROM x.c THEN 'correlation_id'
                WHEN c.reply_to IS DISTINCT FROM x.r THEN 'reply_to'
                WHEN c.max_attempts IS DISTINCT FROM x.m THEN 'max_attempts'
                WHEN c.timeout IS DISTINCT FROM x.o THEN 'timeout'
                WHEN NOT commandbus.is_same_json(c.headers, x.h) THEN 'headers' END
      FROM json_to_recordset(p_rows) AS x(i text, t text, m integer, c text, r text, h json, d json, o float8)
     CROSS JOIN LATERAL (
           SELECT * FROM commandbus.command k WHERE k.domain = p_domain AND k.command_id = x.i OFFSET 0) c;
END
$$;

-- What became of commands that the caller can name: the result, or the error of the last attempt, or who canceled it and
-- why. A PENDING command is answered too: one that is not answered does not exist, or is of a domain that is not the
-- caller's. Indexes: command_domain_command_id_key, the key of attempt, operator_action_command.
CREATE FUNCTION commandbus.outcomes(p_domains text[], p_command_ids text[])
    RETURNS TABLE (id bigint, domain text, command_id text, status text, result text, error_type text, error_code text,
                   error text, operator text, reason text)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.id, c.domain, c.command_id, c.status::text, c.result::text, a.error_type, a.error_code, a.error,
           o.operator, o.reason
      FROM unnest(p_domains, p_command_ids) AS x(domain, command_id)
     CROSS JOIN LATERAL (
           SELECT * FROM commandbus.command k WHERE k.domain = x.domain AND k.command_id = x.command_id OFFSET 0) c
      LEFT JOIN LATERAL (
           SELECT error_type, error_code, error FROM commandbus.attempt
            WHERE command = c.id AND verdict NOT IN ('GIVEN_BACK', 'PARKED') AND c.status NOT IN ('PENDING', 'COMPLETED')
            ORDER BY number DESC, finished_at DESC LIMIT 1) a ON true
      LEFT JOIN LATERAL (
           SELECT operator, reason FROM commandbus.operator_action
            WHERE command = c.id AND action = 'CANCEL' AND c.status = 'CANCELED'
            ORDER BY id DESC LIMIT 1) o ON true
     WHERE x.domain = ANY (ARRAY(SELECT d FROM (SELECT DISTINCT unnest(p_domains) AS d) u
                                  WHERE commandbus.caller_may(d, 'SELECT')))
$$;

-- The audit trail of a command, for roles that may read the queue of its domain. Indexes: the keys.
CREATE FUNCTION commandbus.audit_trail(p_domain text, p_command_id text)
    RETURNS TABLE (event text, at timestamptz, attempt integer, worker text, details text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_command bigint := (SELECT c.id FROM commandbus.command c WHERE c.domain = p_domain AND c.command_id = p_command_id);
BEGIN
    IF NOT COALESCE(has_table_privilege(commandbus.caller(), to_regclass(format('pgmq.%I', 'q_' || p_domain || '__commands')),
                                        'SELECT'), v_command IS NULL) THEN
        RAISE insufficient_privilege USING MESSAGE = format('permission denied for domain %s', p_domain);
    END IF;
    RETURN QUERY
    SELECT a.event, a.at, a.attempt, a.worker, a.details::text FROM commandbus.audit a
     WHERE a.command = v_command ORDER BY a.rank, a.at;
END
$$;

-- --- Batches ---------------------------------------------------------------------------------------------------------

-- A batch that is to be changed, locked; and whether this transaction sees what others commit (READ COMMITTED): who closes
-- a batch must see every member that was added before.
--
-- Locks: the batch row. KEY SHARE (who adds) lets others add, settle and fold, and keeps the batch open until our commit;
-- UPDATE (who closes or cancels) waits for those who add. Index: batch_domain_batch_id_key.
CREATE FUNCTION commandbus.lock_batch(p_domain text, p_batch_id text, p_locking text)
    RETURNS TABLE (id bigint, is_open boolean, status text, is_finished boolean, holds text, cancel text, sees_all boolean)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch commandbus.batch;
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'INSERT');
    IF p_locking = 'KEY SHARE' THEN
        SELECT b.* INTO v_batch FROM commandbus.batch b
         WHERE b.domain = p_domain AND b.batch_id = p_batch_id FOR KEY SHARE;
    ELSIF p_locking = 'NO KEY UPDATE' THEN
        SELECT b.* INTO v_batch FROM commandbus.batch b
         WHERE b.domain = p_domain AND b.batch_id = p_batch_id FOR NO KEY UPDATE;
    ELSE
        SELECT b.* INTO v_batch FROM commandbus.batch b
         WHERE b.domain = p_domain AND b.batch_id = p_batch_id FOR UPDATE;
    END IF;
    IF v_batch.id IS NOT NULL THEN
        RETURN QUERY SELECT v_batch.id, v_batch.is_open, v_batch.status, v_batch.finished_at IS NOT NULL, v_batch.holds,
                            v_batch.cancel::text,
                            current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    END IF;
END
$$;

-- A batch by its name, all members that were added to it, and whether it was made of the same content.
-- Indexes: batch_domain_batch_id_key, batch_delta_batch.
CREATE FUNCTION commandbus.compare_batch(p_domain text, p_batch_id text, p_fingerprint text)
    RETURNS TABLE (id bigint, total bigint, is_same boolean, holds text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'INSERT');
    RETURN QUERY
    SELECT b.id, b.total + COALESCE((SELECT sum(d.total) FROM commandbus.batch_delta d WHERE d.batch = b.id), 0)::bigint,
           b.fingerprint IS NOT DISTINCT FROM p_fingerprint, b.holds
      FROM commandbus.batch b
     WHERE b.domain = p_domain AND b.batch_id = p_batch_id;
END
$$;

-- May members be added to a batch? To one that is open, which then counts them (p_counts), or to one that this transaction
-- has made: its created_at is this transaction's now(), and nobody else sees it yet. Locks: the batch row, FOR KEY SHARE.
CREATE FUNCTION commandbus.check_batch(p_domain text, p_batch bigint, p_holds text, p_counts boolean) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM commandbus.batch b
      WHERE b.id = p_batch AND b.domain = p_domain AND b.holds = p_holds AND b.finished_at IS NULL
        AND CASE WHEN p_counts THEN b.is_open ELSE b.created_at = now() END
        FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE insufficient_privilege USING MESSAGE = format(
            'batch %s is not an open batch of %s in domain %s, nor one that this transaction has made', p_batch, p_holds, p_domain);
    END IF;
END
$$;

-- Sends commands of one domain as members of a batch, like commands/send_many.sql. Returns how many were sent, and the first
-- command_id that exists already: then the caller rolls back. The batch counts them, if it was there before (p_counts).
--
-- Locks and indexes as in commands/send_many.sql; the batch's row FOR KEY SHARE. Without p_own_ids, that is, where all ids are ours,
-- nothing can be in the way.
CREATE FUNCTION commandbus.send_to_batch(p_domain text, p_batch bigint, p_rows json, p_own_ids boolean, p_counts boolean)
    RETURNS TABLE (sent bigint, taken text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'INSERT');
    PERFORM commandbus.check_batch(p_domain, p_batch, 'commands', p_counts);
    EXECUTE format($sql$
WITH input AS MATERIALIZED (
    SELECT x.*, nextval(%1$L::regclass) AS msg_id
      FROM json_to_recordset($3)
        AS x(i text, t text, m integer, c text, r text, h json, d json, s float8, a timestamptz, o float8)
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, batch, max_attempts, correlation_id,
                                    reply_to, headers, data, timeout)
    SELECT $1, i, t, msg_id, $2, m, c, r, h, d, o FROM input %3$s
    RETURNING id, msg_id
), queued AS (
    INSERT INTO pgmq.%2$I (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, COALESCE(input.a, clock_timestamp() + make_interval(secs => COALESCE(input.s, 0))),
           jsonb_build_object('command', sent.id)
      FROM sent JOIN input USING (msg_id) ORDER BY msg_id
    RETURNING vt
), woken AS MATERIALIZED (
    SELECT pg_notify('commandbus_' || $1, extract(epoch FROM min(vt))::text)
      FROM queued
     WHERE EXISTS (SELECT FROM commandbus.waiting WHERE domain = $1 AND expires_at > now())
    HAVING count(*) > 0
)
SELECT (SELECT count(*) FROM sent) + 0 * (SELECT count(*) FROM woken),
       (SELECT i FROM input WHERE NOT EXISTS (SELECT FROM sent WHERE sent.msg_id = input.msg_id) ORDER BY msg_id LIMIT 1)
$sql$, format('pgmq.%I', 'q_' || p_domain || '__commands_msg_id_seq'), 'q_' || p_domain || '__commands',
           CASE WHEN p_own_ids THEN 'ORDER BY i ON CONFLICT DO NOTHING' ELSE '' END)
       INTO sent, taken USING p_domain, p_batch, p_rows;
    IF p_counts AND sent > 0 THEN
        INSERT INTO commandbus.batch_delta (batch, total) VALUES (p_batch, sent);
    END IF;
    RETURN NEXT;
END
$$;

-- May the caller fold batches? If not, a worker does within seconds.
CREATE FUNCTION commandbus.caller_may_fold() RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT has_table_privilege(commandbus.caller(), 'commandbus.batch_delta', 'DELETE')
$$;

-- The members of a new batch are all there. One that is closed and empty is complete: that is noted. Only for a batch that
-- this transaction has made. Returns whether the caller is to fold it now.
CREATE FUNCTION commandbus.fill_batch(p_batch bigint, p_total bigint, p_fingerprint text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_is_complete boolean;
BEGIN
    UPDATE commandbus.batch b SET total = p_total, fingerprint = p_fingerprint
     WHERE b.id = p_batch AND b.created_at = now() AND b.finished_at IS NULL
    RETURNING p_total = 0 AND NOT b.is_open INTO v_is_complete;
    IF v_is_complete IS NULL THEN
        RAISE insufficient_privilege USING MESSAGE = format('batch %s was not made by this transaction', p_batch);
    END IF;
    IF v_is_complete THEN
        INSERT INTO commandbus.batch_delta (batch) VALUES (p_batch);
    END IF;
    RETURN v_is_complete AND commandbus.caller_may_fold();
END
$$;

-- Closes a batch, and notes that it may be complete. Returns whether the caller is to fold it now.
-- Locks: the batch row.
CREATE FUNCTION commandbus.close_batch(p_domain text, p_batch bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'INSERT');
    UPDATE commandbus.batch b SET is_open = false WHERE b.id = p_batch AND b.domain = p_domain AND b.is_open;
    IF FOUND THEN
        INSERT INTO commandbus.batch_delta (batch) VALUES (p_batch);
    END IF;
    RETURN FOUND AND commandbus.caller_may_fold();
END
$$;

-- A batch that the caller can name, as batches/query_batches.sql shows it. What its creator stored with it is only for roles that
-- may read it in the table. Indexes: batch_domain_batch_id_key, batch_delta_batch.
CREATE FUNCTION commandbus.batch_named(p_domain text, p_batch_id text, p_running bigint)
    RETURNS TABLE (id bigint, domain text, batch_id text, name text, holds text, status text, is_open boolean, total bigint,
                   completed bigint, failed bigint, canceled bigint, in_tsq bigint, rate float8, rate_age float8,
                   rate_count bigint, created_at timestamptz, started_at timestamptz, finished_at timestamptz,
                   custom_data text, on_complete text, cancel text, retry_of text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_reads boolean := has_column_privilege(commandbus.caller(), 'commandbus.batch', 'custom_data', 'SELECT');
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'SELECT');
    RETURN QUERY
    SELECT b.id, b.domain, b.batch_id, b.name, b.holds,
           CASE WHEN b.status = 'PENDING' AND (d.has_moved OR p_running > 0) THEN 'IN_PROGRESS' ELSE b.status END,
           b.is_open, b.total + d.total, b.completed + d.completed, b.failed + d.failed, b.canceled + d.canceled,
           greatest(b.in_tsq + d.in_tsq, 0), b.rate, extract(epoch FROM clock_timestamp() - b.rate_at)::float8,
           b.rate_count, b.created_at, b.started_at, b.finished_at,
           CASE WHEN v_reads THEN b.custom_data::text END, CASE WHEN v_reads THEN b.on_complete::text END, b.cancel::text,
           (SELECT o.batch_id FROM commandbus.batch o WHERE o.id = b.retry_of)
      FROM commandbus.batch b
     CROSS JOIN LATERAL (
           SELECT COALESCE(sum(x.total), 0)::bigint AS total, COALESCE(sum(x.completed), 0)::bigint AS completed,
                  COALESCE(sum(x.failed), 0)::bigint AS failed, COALESCE(sum(x.canceled), 0)::bigint AS canceled,
                  COALESCE(sum(x.in_tsq), 0)::bigint AS in_tsq,
                  COALESCE(bool_or(x.completed <> 0 OR x.failed <> 0 OR x.canceled <> 0 OR x.in_tsq <> 0), false) AS has_moved
             FROM commandbus.batch_delta x
            WHERE x.batch = b.id) d
     WHERE b.domain = p_domain AND b.batch_id = p_batch_id;
END
$$;

-- How many members of a batch somebody is running, as in batches/running.sql.
-- Index: q_*_vt_idx: what is held becomes visible within a day, what is parked in years; then the command's key.
CREATE FUNCTION commandbus.running_in_batch(p_domain text, p_batch bigint) RETURNS bigint
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'SELECT');
    EXECUTE format($sql$
SELECT (SELECT count(*)
          FROM (SELECT msg_id, message ->> 'command' AS command
                  FROM pgmq.%I
                 WHERE vt > now() AND vt < now() + interval '1 day' AND headers ? 'held_by'
                OFFSET 0) q
          JOIN commandbus.command c
            ON c.id = CASE WHEN q.command ~ '^[0-9]{1,18}$' THEN q.command::bigint END
           AND c.msg_id = q.msg_id AND c.domain = $1
         WHERE c.batch = $2)
       + (SELECT count(*) FROM commandbus.process
           WHERE domain = $1 AND batch = $2 AND finished_at IS NULL AND started_at IS NOT NULL)
$sql$, 'q_' || p_domain || '__commands') INTO v_count USING p_domain, p_batch;
    RETURN v_count;
END
$$;

-- --- Processes -------------------------------------------------------------------------------------------------------

-- Starts processes of one type: a row and a message each; rows is a JSON array of objects with one-letter keys.
-- Those whose process_id exists are left out: the caller compares them. A batch that was there before counts them
-- (p_counts).
--
-- Locks and indexes: as in commands/send_many.sql; process_domain_process_id_key. The first message's command_id is its own.
CREATE FUNCTION commandbus.start_processes(p_domain text, p_process_type text, p_batch bigint, p_rows json, p_counts boolean)
    RETURNS TABLE (process_id text, id bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_started bigint;
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'INSERT');
    IF p_batch IS NOT NULL THEN
        PERFORM commandbus.check_batch(p_domain, p_batch, 'processes', p_counts);
    END IF;
    RETURN QUERY EXECUTE format($sql$
WITH input AS MATERIALIZED (
    SELECT * FROM json_to_recordset($4) AS x(i text, m text, d json, s float8, r text, c text)
), started AS (
    INSERT INTO commandbus.process (domain, process_id, process_type, data, deadline_at, reply_to, correlation_id, batch)
    SELECT $1, i, $2, d, clock_timestamp() + make_interval(secs => s), r, c, $3 FROM input
     ORDER BY i
    ON CONFLICT (domain, process_id) DO NOTHING
    RETURNING id, process_id
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, correlation_id, data, process, step)
    SELECT $1, m, $2, nextval(%1$L::regclass), process_id,
           json_build_object('event', 'start', 'process', process_id), started.id, 0
      FROM started JOIN input ON i = process_id
    RETURNING id, msg_id
), queued AS (
    INSERT INTO pgmq.%2$I (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, clock_timestamp(), jsonb_build_object('command', id) FROM sent ORDER BY msg_id
    RETURNING vt
), woken AS MATERIALIZED (
    SELECT pg_notify('commandbus_' || $1, extract(epoch FROM min(vt))::text)
      FROM queued
     WHERE EXISTS (SELECT FROM commandbus.waiting WHERE domain = $1 AND expires_at > now())
    HAVING count(*) > 0
)
SELECT process_id, id FROM started WHERE (SELECT count(*) FROM woken) >= 0
$sql$, format('pgmq.%I', 'q_' || p_domain || '__commands_msg_id_seq'), 'q_' || p_domain || '__commands')
        USING p_domain, p_process_type, p_batch, p_rows;
    GET DIAGNOSTICS v_started = ROW_COUNT;
    IF p_counts AND v_started > 0 THEN
        INSERT INTO commandbus.batch_delta (batch, total) VALUES (p_batch, v_started);
    END IF;
END
$$;

-- Compares processes with what is to be started under their ids, as compare_commands does.
-- Index: process_domain_process_id_key.
CREATE FUNCTION commandbus.compare_processes(p_domain text, p_process_type text, p_batch bigint, p_rows json)
    RETURNS TABLE (process_id text, id bigint, difference text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'INSERT');
    RETURN QUERY
    SELECT x.i, p.id,
           CASE WHEN p.process_type <> p_process_type THEN 'process_type'
                WHEN NOT commandbus.is_same_json(p.data, x.d) THEN 'data'
                WHEN p.reply_to IS DISTINCT FROM x.r THEN 'reply_to'
                WHEN p.correlation_id IS DISTINCT FROM x.c THEN 'correlation_id'
                WHEN p.batch IS DISTINCT FROM p_batch THEN 'batch' END
      FROM json_to_recordset(p_rows) AS x(i text, d json, r text, c text)
     CROSS JOIN LATERAL (
           SELECT * FROM commandbus.process k WHERE k.domain = p_domain AND k.process_id = x.i OFFSET 0) p;
END
$$;

-- Forgets timers of processes whose messages have been taken back. Nothing else can be forgotten by it.
-- Locks: command rows. Indexes: the keys.
CREATE FUNCTION commandbus.forget_timers(p_timers bigint[]) RETURNS bigint
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH gone AS (
        DELETE FROM commandbus.command
         WHERE id = ANY (p_timers) AND process IS NOT NULL AND step = 0 AND status = 'PENDING'
           AND data ->> 'event' = 'deadline' AND commandbus.caller_may(domain, 'DELETE')
        RETURNING id
    ), attempts AS (
        DELETE FROM commandbus.attempt WHERE command IN (SELECT id FROM gone)
    ), actions AS (
        DELETE FROM commandbus.operator_action WHERE command IN (SELECT id FROM gone)
    )
    SELECT count(*) FROM gone
$$;

-- --- Pruning ---------------------------------------------------------------------------------------------------------

-- The seconds for which everything finished is kept, whatever those who prune ask for (`commandbus roles --keep`).
CREATE FUNCTION commandbus.least_age() RETURNS float8
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT COALESCE((SELECT value::float8 FROM commandbus.setting WHERE name = 'keep_seconds'), 0)
$$;

-- The domains in which the caller may prune; null: in all.
CREATE FUNCTION commandbus.callers_domains() RETURNS text[]
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN bool_and(COALESCE(may, true)) IS NOT FALSE THEN NULL
                ELSE COALESCE(array_agg(name) FILTER (WHERE may), '{}') END
      FROM (SELECT name, commandbus.caller_may(name, 'DELETE') AS may FROM
              (SELECT name FROM commandbus.domain) d) m
$$;

-- Removes a bite of finished commands and everything about them; those of batches and processes that are not finished,
-- and of processes that finished within the age, stay. Answers how many went, and the id up to which
-- was looked, so that the next bite goes on from there instead of walking over what stays; and whether all that
-- was looked at is too young, which ends the walk (what was sent later cannot have finished earlier than that).
--
-- Locks: command rows that nobody else holds. Index: the key (there is none on finished_at, which a settle
-- changes; ids and ages run together); the keys of batch and process.
CREATE FUNCTION commandbus.prune_commands(p_after_id bigint, p_bite integer, p_through_id bigint, p_age float8)
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
    )
    SELECT (SELECT count(*) FROM gone), (SELECT max(s.id) FROM seen s), (SELECT count(*) FROM seen),
           (SELECT bool_and(s.id > p_through_id AND COALESCE(s.created_at > v_before, true)) FROM seen s);
END
$$;

-- Removes finished batches of a bite that are older than the age (a day, where only a count is kept) and have nothing
-- left: no members, and nothing to fold. Answers how many went, how many were looked at, and the last id of those.
--
-- Locks: batch rows that nobody else holds. Indexes: the key; command_batch, process_batch, batch_delta_batch.
CREATE FUNCTION commandbus.prune_batches(p_after_id bigint, p_bite integer, p_age float8)
    RETURNS TABLE (removed bigint, seen bigint, last_id bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_domains text[] := commandbus.callers_domains();
    v_before timestamptz := now() - make_interval(secs => greatest(COALESCE(p_age, 86400), commandbus.least_age()));
BEGIN
    RETURN QUERY
    WITH seen AS MATERIALIZED (
        SELECT b.id FROM commandbus.batch b WHERE b.id > p_after_id ORDER BY b.id LIMIT p_bite
    ), old AS MATERIALIZED (
        SELECT b.id
          FROM commandbus.batch b
         WHERE b.id IN (SELECT s.id FROM seen s)
           AND b.finished_at < v_before
           AND (v_domains IS NULL OR b.domain = ANY (v_domains))
           AND NOT EXISTS (SELECT FROM commandbus.command c WHERE c.batch = b.id)
           AND NOT EXISTS (SELECT FROM commandbus.process p WHERE p.batch = b.id)
           AND NOT EXISTS (SELECT FROM commandbus.batch_delta d WHERE d.batch = b.id)
           FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM commandbus.batch b WHERE b.id IN (SELECT o.id FROM old o) RETURNING b.id
    )
    SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM seen), (SELECT max(s.id) FROM seen s);
END
$$;

-- Removes finished processes of a bite that are older than the age (a day, where only a count is kept) and have no
-- commands left, with their steps and stray replies. Answers how many went, how many were looked at, and the last id of
-- those.
--
-- Locks: process rows that nobody else holds. Indexes: the key; command_process, process_step's key, stray_reply_process.
CREATE FUNCTION commandbus.prune_processes(p_after_id bigint, p_bite integer, p_age float8)
    RETURNS TABLE (removed bigint, seen bigint, last_id bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_domains text[] := commandbus.callers_domains();
    v_before timestamptz := now() - make_interval(secs => greatest(COALESCE(p_age, 86400), commandbus.least_age()));
BEGIN
    RETURN QUERY
    WITH seen AS MATERIALIZED (
        SELECT p.id FROM commandbus.process p WHERE p.id > p_after_id ORDER BY p.id LIMIT p_bite
    ), old AS MATERIALIZED (
        SELECT p.id
          FROM commandbus.process p
         WHERE p.id IN (SELECT s.id FROM seen s)
           AND p.finished_at < v_before
           AND (v_domains IS NULL OR p.domain = ANY (v_domains))
           AND NOT EXISTS (SELECT FROM commandbus.command c WHERE c.process = p.id)
           FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM commandbus.process p WHERE p.id IN (SELECT o.id FROM old o) RETURNING p.id
    ), steps AS (
        DELETE FROM commandbus.process_step t WHERE t.process IN (SELECT o.id FROM old o)
    ), strays AS (
        DELETE FROM commandbus.stray_reply t WHERE t.process IN (SELECT o.id FROM old o)
    )
    SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM seen), (SELECT max(s.id) FROM seen s);
END
$$;

-- Removes a bite each of old rejected messages, undelivered replies, stray replies of no process that is left,
-- what was done to limits and breakers, and workers that have not beaten for an age (at least a day). Who has some
-- domains only removes what is of these. Returns how many went. Locks: the rows themselves. The tables are small: no index.
CREATE FUNCTION commandbus.prune_asides(p_age float8, p_bite integer) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_domains text[] := commandbus.callers_domains();
    v_before timestamptz := now() - make_interval(secs => greatest(p_age, commandbus.least_age()));
    v_beaten timestamptz := now() - make_interval(secs => greatest(p_age, 86400));
    v_count bigint;
BEGIN
    WITH rejected AS (
        DELETE FROM commandbus.rejected_message
         WHERE id IN (SELECT id FROM commandbus.rejected_message
                       WHERE rejected_at < v_before AND (v_domains IS NULL OR domain = ANY (v_domains)) LIMIT p_bite)
        RETURNING 1
    ), undelivered AS (
        DELETE FROM commandbus.undelivered_reply
         WHERE id IN (SELECT id FROM commandbus.undelivered_reply
                       WHERE created_at < v_before AND v_domains IS NULL LIMIT p_bite)
        RETURNING 1
    ), strays AS (
        DELETE FROM commandbus.stray_reply
         WHERE id IN (SELECT id FROM commandbus.stray_reply s
                       WHERE created_at < v_before AND (v_domains IS NULL OR domain = ANY (v_domains))
                         AND NOT EXISTS (SELECT FROM commandbus.process p WHERE p.id = s.process) LIMIT p_bite)
        RETURNING 1
    ), actions AS (
        DELETE FROM commandbus.control_action
         WHERE id IN (SELECT id FROM commandbus.control_action
                       WHERE performed_at < v_before AND v_domains IS NULL LIMIT p_bite)
        RETURNING 1
    ), workers AS (
        DELETE FROM commandbus.worker
         WHERE heartbeat_at < v_beaten AND (v_domains IS NULL OR domains <@ v_domains)
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM rejected) + (SELECT count(*) FROM undelivered) + (SELECT count(*) FROM strays)
           + (SELECT count(*) FROM actions) + (SELECT count(*) FROM workers)
      INTO v_count;
    RETURN v_count;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA commandbus FROM PUBLIC;
GRANT EXECUTE ON FUNCTION commandbus.moving_rate TO PUBLIC;
