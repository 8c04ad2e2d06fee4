-- Sends the FAILED members of a batch again, as members of another batch. Each has the same content, and a command_id
-- that is made from the failed command's id, so no member is sent again twice. Returns how many were sent, how many were
-- looked at, and the last id that was looked at.
--
-- Locks and indexes as in commands/send_many.sql. The failed commands are read in the order of command_batch. The new
-- commands send no reply to bus.call, because that caller has gone.
WITH picked AS MATERIALIZED (
    SELECT pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(pg_catalog.convert_to(
               'commandbus: retry of command ' || id::text, 'UTF8')), 1, 16), 'hex')::uuid::text
               AS command_id,
           id, command_type, max_attempts, correlation_id, nullif(reply_to, '!call') AS reply_to, headers, data, timeout,
           on_exhausted, priority
      FROM commandbus.command
     WHERE (batch, id) > (%(batch)s, %(after_id)s) AND batch <= %(batch)s
       AND status OPERATOR(pg_catalog.=) 'FAILED'
     ORDER BY batch, id
     LIMIT %(bite)s
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, batch, max_attempts, correlation_id,
                                    reply_to, headers, data, timeout, on_exhausted, priority)
    SELECT %(domain)s, command_id, command_type, pg_catalog.nextval('pgmq.{queue}_msg_id_seq'), %(into)s,
           max_attempts,
           correlation_id, reply_to, headers, data, timeout, on_exhausted, priority
      FROM picked
     ORDER BY id
    ON CONFLICT (domain, command_id) DO NOTHING
    RETURNING id, msg_id, priority
), queued AS (
    INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, pg_catalog.clock_timestamp() + {shift_for priority}, pg_catalog.jsonb_build_object('command', id)
      FROM sent
     ORDER BY msg_id
    RETURNING vt
), woken AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, extract(epoch FROM pg_catalog.min(vt))::text)
      FROM queued
     WHERE EXISTS (SELECT FROM commandbus.waiting WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
    HAVING pg_catalog.count(*) > 0
)
SELECT (SELECT pg_catalog.count(*) FROM sent), (SELECT pg_catalog.count(*) FROM picked),
       (SELECT pg_catalog.max(id) FROM picked),
       (SELECT pg_catalog.count(*) FROM woken)
