-- Leases commands of one type that wait for a handler, straight from `parked`. So they never become visible to workers
-- without a handler for them. Returns the columns of commands/claim.sql, in the same order. Takes nothing while the
-- domain is paused.
--
-- `of_age` leaves out commands that have not waited long enough to be given up. `paused` names the pauses because of which
-- commands stay here; '' is the pause of the domain.
-- Locks: rows of parked, then queue rows, SKIP LOCKED. It never waits for a lock, so this order is harmless.
-- Indexes: parked_reason (its columns are compared as a row, which no other index offers), the queue's key, the
-- command's key.
-- A row of parked whose message is gone is deleted. A row with a reserved permit becomes a row of that limit again, as one
-- whose turn has come.
WITH chosen AS MATERIALIZED (
    SELECT seq, msg_id, kept_limit
      FROM commandbus.parked
     WHERE (reason, domain, command_type, seq) > ('handler', %(domain)s::text, %(type)s::text, 0::bigint)
       AND (reason, domain, command_type) <= ('handler', %(domain)s::text, %(type)s::text) {of_age}
       AND NOT EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = ANY (%(paused)s::text[]))
     ORDER BY reason, domain, command_type, seq
     LIMIT %(n)s
       FOR UPDATE SKIP LOCKED
), picked AS MATERIALIZED (
    SELECT msg_id, vt
      FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM chosen)) AND headers IS NULL
     ORDER BY msg_id
       FOR UPDATE SKIP LOCKED
), reached AS MATERIALIZED (
    SELECT (extract(epoch FROM greatest(pg_catalog.max({due_at}), 'epoch')) * 1000000::numeric)::bigint AS last_vt,
           (extract(epoch FROM pg_catalog.now()) * 1000000::numeric)::bigint AS claimed_at
      FROM picked
), holder AS MATERIALIZED (
    SELECT pg_catalog.jsonb_build_object('held_by', %(worker)s::text, 'since', pg_catalog.now()) AS holder
), broken AS MATERIALIZED (
    SELECT command_type, probe FROM commandbus.breaker WHERE domain = %(domain)s AND state <> 'CLOSED'
), leased AS (
    UPDATE pgmq.{queue}
       SET read_ct = least(read_ct, 100000000) + 1,
           vt = pg_catalog.now() + pg_catalog.make_interval(secs => %(lease)s) + {own_shift},
           headers = (SELECT holder FROM holder)
     WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM picked))
    RETURNING msg_id, read_ct, message
), freed AS (
    DELETE FROM commandbus.parked
     WHERE seq = ANY (ARRAY(
           SELECT c.seq FROM chosen c
            WHERE (c.kept_limit IS NULL AND c.msg_id IN (SELECT msg_id FROM picked))
               OR (SELECT true FROM pgmq.{queue} q WHERE q.msg_id = c.msg_id) IS NULL))
), kept AS (
    UPDATE commandbus.parked
       SET reason = 'limit', limit_name = kept_limit, kept_limit = NULL, note = NULL, woken_at = pg_catalog.now()
     WHERE seq = ANY (ARRAY(
           SELECT c.seq FROM chosen c WHERE c.kept_limit IS NOT NULL AND c.msg_id IN (SELECT msg_id FROM picked)))
)
SELECT l.msg_id, l.read_ct, c.id, c.command_id, c.command_type, c.data::text, least(c.attempt_base, 2000000000), c.waived,
       c.max_attempts, c.correlation_id, c.reply_to, c.headers::text,
       pg_catalog.date_part('epoch', c.created_at),
       c.command_type = ANY (ARRAY(SELECT command_type FROM commandbus.pause WHERE domain = %(domain)s))
           OR (c.command_type = ANY (ARRAY(SELECT command_type FROM broken))
               AND c.id <> ALL (ARRAY(SELECT probe FROM broken WHERE probe IS NOT NULL))),
       NULL, NULL, (SELECT last_vt FROM reached), (SELECT claimed_at FROM reached),
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
