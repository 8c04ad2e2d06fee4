-- Tells a process how a nested process has ended: a message to it. Returns no row if the parent is not there.
--
-- Locks: new rows only. Index: process's key.
WITH sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, correlation_id, data, process, step)
    SELECT p.domain, pg_catalog.gen_random_uuid()::text, p.process_type, pg_catalog.nextval('pgmq.{queue}_msg_id_seq'),
           p.process_id,
           pg_catalog.json_build_object('event', 'reply', 'process', p.process_id, 'step', pg_catalog.abs(%(step)s),
                                        'reply', %(message)s::json), p.id, 0
      FROM commandbus.process p
     WHERE p.id = %(parent)s
    RETURNING id, msg_id, domain
)
INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
SELECT msg_id, pg_catalog.clock_timestamp(), pg_catalog.jsonb_build_object('command', id)
  FROM sent
RETURNING pg_catalog.pg_notify('commandbus_' || (SELECT domain FROM sent), extract(epoch FROM vt)::text)
