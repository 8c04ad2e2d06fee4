-- Claims up to n visible messages of one domain and returns what to run.
--
-- Locks: queue rows, SKIP LOCKED, so claimers never wait for any transaction; no other table's rows.
-- Index: q_*_vt_idx, a range scan from the claimer's cursor. The order is by vt, not by msg_id, so that delayed
-- messages are not in the way. Only with now(), not with clock_timestamp(), can the index be used. The cursor is compared
-- as a row: without statistics, PostgreSQL estimates a range with two plain bounds as a two-hundredth of the table, and
-- would sort all visible rows instead of walking along the index. `sign(n) = 1` is always true. A plan for these values
-- does not contain it, but it makes a generic plan expect few rows. Without it, the generic plan would look more
-- expensive than it is, and the server would plan every claim of a large queue again (a tenth of a claim of 200).
--
-- The update goes by ctid, and the command rows by their key inside a LATERAL that cannot be flattened. So no estimate
-- of the backlog can turn either into a scan. The domain is compared outside the LATERAL. Inside, it would offer the
-- planner command_domain_command_id_key, which looks as good as the key while the table is small (ADR 15).
--
-- `kind` is always true, unless a flood of raw messages is in the queue. Then it distinguishes commands from raw messages
-- (flow/commands/claim.py).
--
-- It claims from one band of vt (ADR 27): `shift` says how far from now. The claim of the normal band also says (`others`)
-- whether something is due in the other two: 1 is high, 2 is low, 3 is both. That is a look at one index entry each.
--
-- One row write each: read_ct, vt and the holder. If the worker that held a row has vanished, the row keeps that holder
-- under "before" until flow/commands/claim.py has recorded the lost attempt.
--
-- A command is marked if its type is paused, or if the breaker of its type is not closed and the command is not the
-- probe. flow/commands/claim.py parks marked commands. Pauses and breakers are read once, and only if something was
-- claimed.
--
-- A message belongs to a command only if the command names the message, too (msg_id and domain), and the command waits. Any
-- client can write {"command": 7}, even with the msg_id of a command that has ended. The rest of a message and its
-- headers are not read here: 81 KB of jsonb can be a gigabyte of text. Moments and counts are clamped to what Python and
-- the next claim can handle, because another client may write any value, even -infinity. Moments come as numbers,
-- because timestamps are slow to write and to read in every row. Python makes a datetime of `created_at` only on request.
-- The rows come in any order: Python sorts them by msg_id for less than the server would need.
WITH picked AS MATERIALIZED (
    SELECT ctid, vt
      FROM pgmq.{queue}
     WHERE vt <= pg_catalog.now(){shift}
       AND (vt, msg_id) >= (%(cursor)s::timestamptz, 0)
       AND (pg_catalog.sign(%(n)s::float8) = 1::float8 OR msg_id = 0)
       AND NOT EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = '')
       AND {kind}
     ORDER BY vt
     LIMIT %(n)s
       FOR UPDATE SKIP LOCKED
), reached AS MATERIALIZED (
    SELECT (extract(epoch FROM greatest(pg_catalog.max(vt){shift_back}, 'epoch')) * 1000000::numeric)::bigint AS last_vt,
           (extract(epoch FROM pg_catalog.now()) * 1000000::numeric)::bigint AS claimed_at
      FROM picked
), holder AS MATERIALIZED (
    SELECT pg_catalog.jsonb_build_object('held_by', %(worker)s::text, 'since', pg_catalog.now()) AS holder
), broken AS MATERIALIZED (
    SELECT command_type, probe FROM commandbus.breaker WHERE domain = %(domain)s AND state <> 'CLOSED'
), leased AS (
    UPDATE pgmq.{queue}
       SET read_ct = least(read_ct, 100000000) + 1,
           vt = pg_catalog.now(){shift} + pg_catalog.make_interval(secs => %(lease)s),
           headers = CASE WHEN headers IS NULL THEN (SELECT holder FROM holder)
                          ELSE (SELECT holder FROM holder) || pg_catalog.jsonb_build_object('before', headers) END
     WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked))
    RETURNING msg_id, read_ct, message, headers ? 'before'::text AS is_lost
)
SELECT l.msg_id, l.read_ct, c.id, c.command_id, c.command_type, c.data::text, least(c.attempt_base, 2000000000), c.waived,
       c.max_attempts, c.correlation_id, c.reply_to, c.headers::text,
       pg_catalog.date_part('epoch', c.created_at),
       c.command_type = ANY (ARRAY(SELECT command_type FROM commandbus.pause WHERE domain = %(domain)s))
           OR (c.command_type = ANY (ARRAY(SELECT command_type FROM broken))
               AND c.id <> ALL (ARRAY(SELECT probe FROM broken WHERE probe IS NOT NULL))),
       NULLIF(l.is_lost, false), {others}, (SELECT last_vt FROM reached), (SELECT claimed_at FROM reached),
       c.timeout, c.suspect, c.step, c.batch, c.id = ANY (ARRAY(SELECT probe FROM broken WHERE probe IS NOT NULL)),
       c.quarantine, c.alone,
       CASE WHEN c.expires_at IS NOT NULL OR c.snoozes IS NOT NULL OR c.on_exhausted IS NOT NULL
                 OR c.key IS NOT NULL OR c.single
            THEN pg_catalog.json_build_array(extract(epoch FROM c.expires_at - pg_catalog.now()), c.on_exhausted,
                     c.snoozes, extract(epoch FROM pg_catalog.now() - c.snoozed_at), c.key_limit, c.key,
                     c.single, CASE WHEN c.key IS NOT NULL
                                    THEN (SELECT state FROM commandbus.keyed k WHERE k.command = c.id) END)::text END,
       CASE WHEN l.read_ct > 1 OR c.attempt_base > 0
            THEN (SELECT k.value::text FROM commandbus.checkpoint k WHERE k.command = c.id) END
  FROM leased l
  LEFT JOIN LATERAL (
       SELECT *
         FROM commandbus.command
        WHERE id = CASE WHEN l.message -> 'command'::text BETWEEN '1'::jsonb AND '999999999999999999'::jsonb
                             AND pg_catalog.jsonb_typeof(l.message -> 'command'::text) = 'number'
                        THEN (l.message -> 'command'::text)::bigint END
       OFFSET 0) c ON c.msg_id = l.msg_id AND c.domain = %(domain)s AND c.status OPERATOR(pg_catalog.=) 'PENDING'
