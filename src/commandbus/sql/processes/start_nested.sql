-- Starts a nested process: its row and its first message. Returns no row if the process_id exists.
--
-- Locks: new rows only. Index: process_domain_process_id_key.
WITH started AS (
    INSERT INTO commandbus.process (domain, process_id, process_type, data, deadline_at, reply_to, correlation_id, parent,
                                    parent_step, root, depth)
    VALUES (%(domain)s, %(process_id)s, %(process_type)s, %(data)s::json,
            pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(seconds)s), %(reply_to)s, %(correlation_id)s,
            %(parent)s, %(parent_step)s, %(root)s, %(depth)s)
    ON CONFLICT (domain, process_id) DO NOTHING
    RETURNING id, process_id
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, correlation_id, data, process, step)
    SELECT %(domain)s, %(command_id)s, %(process_type)s, pg_catalog.nextval('pgmq.{queue}_msg_id_seq'), process_id,
           pg_catalog.json_build_object('event', 'start', 'process', process_id), id, 0
      FROM started
    RETURNING id, msg_id
)
INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
SELECT msg_id, pg_catalog.clock_timestamp(), pg_catalog.jsonb_build_object('command', id)
  FROM sent
RETURNING CASE WHEN EXISTS (SELECT FROM commandbus.waiting
                             WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
               THEN pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM vt)::text) END
