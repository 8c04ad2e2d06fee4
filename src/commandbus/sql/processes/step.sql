-- Sends the command of a process's step: the command, its queue row, and the row of the step. Returns no row if the
-- command_id exists. If the process already has a step with this number, another worker has moved it, and
-- processes/advance.sql will refuse.
--
-- Locks: new rows only, as in commands/send.sql. Indexes: command_domain_command_id_key, process_step's key.
WITH sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, max_attempts, correlation_id, reply_to,
                                    headers, data, timeout, process, step, on_exhausted, priority,
                                    due_at)
    VALUES (%(domain)s, %(command_id)s, %(command_type)s, pg_catalog.nextval('pgmq.{queue}_msg_id_seq'),
            %(max_attempts)s,
            %(correlation_id)s, %(reply_to)s, %(headers)s::json, %(data)s::json, %(timeout)s, %(process)s, %(step)s,
            %(on_exhausted)s,
            (SELECT u.priority FROM commandbus.type_rule u WHERE u.domain = %(domain)s AND u.command_type = %(command_type)s),
            pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => nullif(%(delay)s::float8, 0::float8)))
    ON CONFLICT (domain, command_id) DO NOTHING
    RETURNING id, msg_id, priority
), noted AS (
    INSERT INTO commandbus.process_step (process, number, name, undoes, command, timer, domain, command_id, command_type,
                                         has_undo, deadline_at)
    SELECT %(process)s, pg_catalog.abs(%(step)s), %(name)s, %(undoes)s, id, %(timer)s, %(domain)s, %(command_id)s,
           %(command_type)s, %(has_undo)s,
           pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(deadline)s)
      FROM sent
    ON CONFLICT (process, number) DO NOTHING
)
INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
SELECT msg_id, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(delay)s) + {shift_for priority},
       pg_catalog.jsonb_build_object('command', id)
  FROM sent
RETURNING (message ->> 'command'::text)::bigint,
          CASE WHEN EXISTS (SELECT FROM commandbus.waiting
                             WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
               THEN pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM vt)::text) END
