-- Sends a message to a process: a timer, or an operator's retry. Returns the message's command.
--
-- Locks: new rows only. Indexes: command_domain_command_id_key.
WITH sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, correlation_id, data, process, step, due_at)
    VALUES (%(domain)s, %(command_id)s, %(process_type)s, pg_catalog.nextval('pgmq.{queue}_msg_id_seq'),
            %(process_id)s,
            %(data)s::json, %(process)s, 0,
            pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => nullif(%(delay)s::float8, 0::float8)))
    RETURNING id, msg_id
)
INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
SELECT msg_id, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(delay)s),
       pg_catalog.jsonb_build_object('command', id)
  FROM sent
RETURNING (message ->> 'command'::text)::bigint,
          CASE WHEN EXISTS (SELECT FROM commandbus.waiting
                             WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
               THEN pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM vt)::text) END
