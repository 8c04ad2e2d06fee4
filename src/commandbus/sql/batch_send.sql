-- Sends commands of one domain as members of a batch, like send_many.sql. Returns how many were sent, and the first
-- command_id that exists already: then the caller rolls back.
--
-- Locks and indexes as in send_many.sql; the batch's counts are not written here.
WITH input AS MATERIALIZED (
    SELECT x.*, pg_catalog.nextval('pgmq.{queue}_msg_id_seq') AS msg_id
      FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(i text, t text, m integer, c text, r text, h json, d json, s float8, a timestamptz, o float8)
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, batch, max_attempts, correlation_id,
                                    reply_to, headers, data, timeout)
    SELECT %(domain)s, i, t, msg_id, %(batch)s, m, c, r, h, d, o FROM input {by_id}
    {conflict}
    RETURNING id, msg_id
), queued AS (
    INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, COALESCE(input.a, pg_catalog.clock_timestamp()
                            + pg_catalog.make_interval(secs => COALESCE(input.s, 0))),
           pg_catalog.jsonb_build_object('command', sent.id)
      FROM sent JOIN input USING (msg_id) {by_turn}
    RETURNING vt
), woken AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM pg_catalog.min(vt))::text)
      FROM queued
     WHERE EXISTS (SELECT FROM commandbus.waiting WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
    HAVING pg_catalog.count(*) > 0
)
SELECT (SELECT pg_catalog.count(*) FROM sent),
       (SELECT i FROM input WHERE NOT EXISTS (SELECT FROM sent WHERE sent.msg_id = input.msg_id) ORDER BY msg_id LIMIT 1),
       (SELECT pg_catalog.count(*) FROM woken)
