-- Puts claimed commands into the lines of their keys (`k`, or what is at the path `p`), instead of running them. They hold no slot
-- and no lease meanwhile, and are not charged. Returns commands that somebody asked to cancel, which stay held, and those
-- whose key is not usable, which the caller settles.
-- Locks: queue rows, command rows, then rows of `keyed`. It waits for a queue row, as commands/park.sql does. Indexes: the keys.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json)
        AS x(m bigint, r integer, c bigint, n integer, l text, k text, p text)
), held AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct, q.message ->> 'command'::text AS command, q.headers -> 'cancel'::text AS cancel
      FROM pgmq.{queue} q
     WHERE q.msg_id = ANY (ARRAY(SELECT m FROM input))
       AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
     ORDER BY q.msg_id
       FOR UPDATE
), fenced AS MATERIALIZED (
    SELECT i.*, h.cancel, COALESCE(i.k, commandbus.key_of(i.p, c.data, c.headers)) AS key
      FROM held h
      JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct AND i.c::text = h.command
     CROSS JOIN LATERAL (SELECT data, headers FROM commandbus.command WHERE id = i.c OFFSET 0) c
), joining AS MATERIALIZED (
    SELECT * FROM fenced WHERE cancel IS NULL AND key IS NOT NULL
), hidden AS (
    UPDATE pgmq.{queue} q SET headers = NULL, vt = pg_catalog.now() + interval '10 years' + {own_shift}
      FROM joining j WHERE q.msg_id = j.m
), waived AS (
    UPDATE commandbus.command c SET waived = c.waived + 1, key_limit = j.l, key = j.key
      FROM joining j WHERE c.id = j.c AND c.msg_id = j.m
), noted AS (
    INSERT INTO commandbus.attempt (command, number, verdict, worker, error_code, error, limit_name)
    SELECT c, n, 'PARKED', %(worker)s, 'KEY_LIMIT', 'waits for its turn: ' || l || ' ' || key, l FROM joining
), joined AS (
    INSERT INTO commandbus.keyed (command, msg_id, domain, key_limit, key)
    SELECT c, m, %(domain)s, l, key FROM joining ORDER BY c
    ON CONFLICT (command) DO UPDATE SET msg_id = excluded.msg_id, state = 'NEW', released_at = NULL
), told AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_keys', %(domain)s) WHERE EXISTS (SELECT FROM joining)
)
SELECT m, cancel ->> 'by'::text, cancel ->> 'reason'::text, cancel IS NULL, (SELECT pg_catalog.count(*) FROM told)
  FROM fenced WHERE cancel IS NOT NULL OR key IS NULL
