-- Makes the firings of schedules of one domain that were decided (model/schedule.py), and moves their rows. It is one
-- statement, so that no lock waits for a program that has stopped. A schedule that somebody has changed or fired since the
-- decision, or is changing now, is left out. So each firing is made once, by one of all workers. If a person or a restored
-- backup moved a row back, the ids of the commands prevent a second firing: they contain the schedule and the instant.
--
-- rows: the decision for each schedule; `firings` are the commands, with the id and the instant. `fired_at` is the instant
-- of the last of them, and null for a run that a person asked for.
--
-- Locks: the schedules' rows (SKIP LOCKED); none that a sender could wait for. Indexes: schedule_pkey,
-- command_domain_command_id_key.
WITH input AS MATERIALIZED (
    SELECT x.*
      FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(name text, version bigint, passed_at timestamptz, next_at timestamptz, fired_at timestamptz,
             waiting_since timestamptz, skipped bigint, note text, firings json)
), taken AS MATERIALIZED (
    SELECT s.name
      FROM commandbus.schedule s JOIN input ON input.name = s.name
     WHERE s.domain = %(domain)s AND s.version = input.version AND (s.paused_at IS NULL OR %(even_paused)s)
       FOR UPDATE OF s SKIP LOCKED
), firing AS MATERIALIZED (
    SELECT s.name, s.command_type, s.timeout, s.max_attempts, s.expires, s.on_exhausted,
           COALESCE(s.priority, (SELECT u.priority FROM commandbus.type_rule u WHERE u.domain = s.domain AND u.command_type = s.command_type)) AS priority,
           s.correlation_id, s.reply_to, s.data,
           f.id AS command_id,
           (COALESCE(s.headers::jsonb, '{}'::jsonb)
            OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_object('schedule', s.name, 'scheduled_for', f.at))::json AS headers,
           pg_catalog.nextval('pgmq.{queue}_msg_id_seq') AS msg_id
      FROM taken
      JOIN input ON input.name = taken.name
      JOIN commandbus.schedule s ON s.domain = %(domain)s AND s.name = taken.name
     CROSS JOIN LATERAL pg_catalog.json_to_recordset(input.firings) AS f(id text, at text)
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, max_attempts, correlation_id,
                                    reply_to, headers, data, timeout, on_exhausted, priority, expires_at)
    SELECT %(domain)s, command_id, command_type, msg_id, max_attempts, correlation_id, reply_to, headers, data, timeout,
           on_exhausted, priority, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => expires)
      FROM firing
     ORDER BY msg_id
    ON CONFLICT DO NOTHING
    RETURNING id, msg_id, priority
), queued AS (
    INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, pg_catalog.clock_timestamp() + {shift_for priority}, pg_catalog.jsonb_build_object('command', id)
      FROM sent ORDER BY msg_id
    RETURNING vt
), woken AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM pg_catalog.min(vt))::text)
      FROM queued
     WHERE EXISTS (SELECT FROM commandbus.waiting WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
    HAVING pg_catalog.count(*) > 0
), done AS MATERIALIZED (
    SELECT firing.name, pg_catalog.count(*) AS commands, pg_catalog.max(sent.id) AS last
      FROM sent JOIN firing ON firing.msg_id = sent.msg_id
     GROUP BY firing.name
), moved AS (
    UPDATE commandbus.schedule s
       SET version = s.version + 1,
           passed_at = input.passed_at,
           next_at = input.next_at,
           last_fired = COALESCE(input.fired_at, s.last_fired),
           last_command = COALESCE(done.last, s.last_command),
           fired = s.fired + COALESCE(done.commands, 0::bigint),
           skipped = s.skipped + input.skipped,
           waiting_since = input.waiting_since,
           note = COALESCE(input.note, s.note),
           noted_at = CASE WHEN input.note IS NULL THEN s.noted_at ELSE pg_catalog.clock_timestamp() END
      FROM taken
      JOIN input ON input.name = taken.name
      LEFT JOIN done ON done.name = taken.name
     WHERE s.domain = %(domain)s AND s.name = taken.name
    RETURNING s.name, COALESCE(done.commands, 0::bigint) AS commands, done.last
)
SELECT name, commands, last, (SELECT pg_catalog.count(*) FROM woken) FROM moved
