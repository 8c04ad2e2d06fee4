-- Sends many commands of one domain in one statement; rows is a JSON array of objects with one-letter keys.
--
-- Locks and indexes as in commands/send.sql. Rows whose command_id exists are left out; the caller
-- (flow/commands/send.py) looks at these and decides. Ids that the caller chose are inserted in the order of the ids,
-- so that two senders of the same ids wait for each other instead of deadlocking. The queue keeps the caller's order.
-- There is one NOTIFY for all, with the earliest vt. The ids are not read from the command rows, because a producer may
-- not read them. They come from the input. If we generated all ids, no row can be left out, and the result is in the order
-- of the input. Nothing is sent if one of the types (`kinds`) has a rule.
WITH ours AS (  -- never run; comes first, so that without our schema the error names the schema, not the queue
    SELECT FROM commandbus.command
), input AS MATERIALIZED (
    SELECT x.*, pg_catalog.nextval('pgmq.{queue}_msg_id_seq') AS msg_id
      FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(i text, t text, m integer, c text, r text, h json, d json, s float8, a timestamptz, o float8, e float8,
             z timestamptz, f text, p smallint)
     WHERE NOT EXISTS (SELECT FROM commandbus.type_rule
                        WHERE domain = %(domain)s AND command_type = ANY (%(kinds)s::text[]))
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, max_attempts, correlation_id,
                                    reply_to, headers, data, timeout, on_exhausted, priority, expires_at, due_at)
    SELECT %(domain)s, i, t, msg_id, m, c, r, h, d, o, f, p,
           COALESCE(z, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => e)),
           greatest(a, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => nullif(s, 0::float8)))
      FROM input {by_id}
    {conflict}
    RETURNING id, msg_id
), queued AS (
    INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, greatest(input.a, pg_catalog.clock_timestamp()
                            + pg_catalog.make_interval(secs => COALESCE(input.s, 0))) + {shift_for input.p},
           pg_catalog.jsonb_build_object('command', sent.id)
      FROM sent JOIN input USING (msg_id) {by_turn}
    RETURNING vt
), woken AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM pg_catalog.min(vt))::text)
      FROM queued
     WHERE EXISTS (SELECT FROM commandbus.waiting WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
    HAVING pg_catalog.count(*) > 0
)
SELECT {answer}
