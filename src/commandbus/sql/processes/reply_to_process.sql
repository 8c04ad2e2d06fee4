-- Replies to the steps of processes. Each becomes a command of the process's type in the process's domain. If the
-- command belongs to no process, but its sender named this queue, the reply goes there as it is.
--
-- Locks: new rows only. Indexes: the keys of command and process, inside LATERALs that cannot be flattened.
WITH input AS MATERIALIZED (
    SELECT m.value AS message, c.process, c.step, pg_catalog.nextval('pgmq.{queue}_msg_id_seq') AS msg_id
      FROM pg_catalog.json_array_elements(%(messages)s::json) WITH ORDINALITY AS m(value, i)
      JOIN pg_catalog.unnest(%(commands)s::bigint[]) WITH ORDINALITY AS k(id, i) USING (i)
      LEFT JOIN LATERAL (SELECT process, step FROM commandbus.command WHERE id = k.id OFFSET 0) c ON true
), sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, correlation_id, data, process, step)
    SELECT p.domain, pg_catalog.gen_random_uuid()::text, p.process_type, i.msg_id, p.process_id,
           pg_catalog.json_build_object('event', 'reply', 'process', p.process_id, 'step', pg_catalog.abs(i.step),
                                        'reply', i.message), p.id, 0
      FROM input i
     CROSS JOIN LATERAL (
           SELECT id, domain, process_id, process_type FROM commandbus.process WHERE id = i.process OFFSET 0) p
    RETURNING id, msg_id
), queued AS (
    INSERT INTO pgmq.{queue} (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT i.msg_id, pg_catalog.clock_timestamp(),
           CASE WHEN s.id IS NULL THEN i.message::jsonb ELSE pg_catalog.jsonb_build_object('command', s.id) END
      FROM input i LEFT JOIN sent s USING (msg_id)
     ORDER BY i.msg_id
    RETURNING vt
)
SELECT pg_catalog.pg_notify('commandbus_' || pg_catalog.left(%(queue)s, -10),
                            extract(epoch FROM pg_catalog.min(vt))::text) FROM queued
