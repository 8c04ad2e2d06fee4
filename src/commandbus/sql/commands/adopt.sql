-- Turns raw messages, which another PGMQ client sent, into commands. The messages become thin, like ours. They go back to
-- the queue: the next claim finds an ordinary command, and its attempts are counted from there.
--
-- Locks: queue rows that this worker has just claimed, then new command rows. It waits for a locked queue row, because
-- another claimer may lock it until its statement ends. If it skipped that row, a good message would be rejected as a bad
-- one. Indexes: the queue's key, command_domain_command_id_key, type_rule_pkey.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(m bigint, k integer, i text, t text, x integer, c text, r text, h json, d json, o float8, e float8,
             f text, p smallint)
), held AS MATERIALIZED (
    SELECT q.msg_id, q.enqueued_at
      FROM pgmq.{queue} q
     WHERE q.msg_id = ANY (ARRAY(SELECT m FROM input))
       AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
     ORDER BY q.msg_id
       FOR UPDATE
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, created_at, max_attempts,
                                    correlation_id, reply_to, headers, data, timeout, attempt_base, waived, on_exhausted,
                                    priority, expires_at)
    SELECT %(domain)s, i, t, msg_id, greatest(least(enqueued_at, pg_catalog.now()), 'epoch'), x, c, r, h, d,
           o, -k, k, f, COALESCE(p, (SELECT u.priority FROM commandbus.type_rule u WHERE u.domain = %(domain)s AND u.command_type = t)),
           pg_catalog.now() + pg_catalog.make_interval(secs => e)
      FROM held JOIN input ON m = msg_id
    ON CONFLICT (domain, command_id) DO NOTHING
    RETURNING id, msg_id, priority
), thinned AS (
    UPDATE pgmq.{queue} q
       SET message = pg_catalog.jsonb_build_object('command', s.id), headers = NULL,
           vt = pg_catalog.now() + {shift_for s.priority}
      FROM sent s
     WHERE q.msg_id = s.msg_id
)
SELECT msg_id FROM sent
