-- Sends one command: its row and its queue row (two row writes), and a NOTIFY if an idle worker asked for one.
--
-- Locks: none that another sender could wait for, unless both use the same command_id. Then the unique constraint makes the
-- second sender wait for the first one's commit and insert nothing. Indexes: command_domain_command_id_key, type_rule_pkey.
-- Nothing is sent if the type has a rule; the caller (flow/commands/send.py) then uses commandbus.send_keyed.
-- vt is clock_timestamp(), not now(): claims go by vt, so a command of a long transaction must not get a vt that claimers
-- have already passed. A moment in the past (`at`) is not used either: such a command would overtake all that were sent
-- before it.
WITH sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, max_attempts, correlation_id,
                                    reply_to, headers, data, timeout, on_exhausted, priority, expires_at, due_at)
    SELECT %(domain)s, %(command_id)s, %(command_type)s, pg_catalog.nextval('pgmq.{queue}_msg_id_seq'),
            %(max_attempts)s,
            %(correlation_id)s, %(reply_to)s, %(headers)s::json, %(data)s::json, %(timeout)s,
            %(on_exhausted)s, %(priority)s,
            COALESCE(%(expires_at)s::timestamptz,
                     pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(expires_in)s)),
            greatest(%(at)s::timestamptz,
                     pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => nullif(%(delay)s::float8, 0::float8)))
     WHERE NOT EXISTS (SELECT FROM commandbus.type_rule WHERE domain = %(domain)s AND command_type = %(command_type)s)
    {conflict}
    RETURNING id, msg_id
)
INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
SELECT msg_id,
       greatest(%(at)s::timestamptz, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(delay)s))
           + {shift_for %(priority)s::smallint},
       pg_catalog.jsonb_build_object('command', id)
  FROM sent
RETURNING (SELECT id FROM sent),
          CASE WHEN EXISTS (SELECT FROM commandbus.waiting WHERE domain = %(domain)s
                               AND expires_at > pg_catalog.now())
               THEN pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM vt)::text) END
