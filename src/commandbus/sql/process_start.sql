-- Starts processes of one type: a row and a message each; rows is a JSON array of objects with one-letter keys.
-- Those whose process_id exists are left out: the caller looks at them and decides.
--
-- Locks and indexes: as in send_many.sql; process_domain_process_id_key. The first message's command_id is its own.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(i text, m text, d json, s float8, r text, c text)
), started AS (
    INSERT INTO commandbus.process (domain, process_id, process_type, data, deadline_at, reply_to, correlation_id, batch)
    SELECT %(domain)s, i, %(process_type)s, d, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => s),
           r, c, %(batch)s FROM input
     ORDER BY i
    ON CONFLICT (domain, process_id) DO NOTHING
    RETURNING id, process_id
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, correlation_id, data, process, step)
    SELECT %(domain)s, m, %(process_type)s, pg_catalog.nextval('pgmq.{queue}_msg_id_seq'), process_id,
           pg_catalog.json_build_object('event', 'start', 'process', process_id), started.id, 0
      FROM started JOIN input ON i = process_id
    RETURNING id, msg_id
), queued AS (
    INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, pg_catalog.clock_timestamp(), pg_catalog.jsonb_build_object('command', id) FROM sent
     ORDER BY msg_id
    RETURNING vt
), woken AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM pg_catalog.min(vt))::text)
      FROM queued
     WHERE EXISTS (SELECT FROM commandbus.waiting WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
    HAVING pg_catalog.count(*) > 0
)
SELECT process_id, id, (SELECT pg_catalog.count(*) FROM woken) FROM started
