-- What a dead worker still holds in one domain, with everything that is needed to settle it. A raw message that is not
-- a command yet comes without a command.
--
-- Locks: none; the settlement is fenced. Indexes: q_*_vt_idx, between a moment before the death and the longest lease
-- that an attempt gets without asking for more; the queue's key for attempts that ran, whose leases may be longer; the
-- command's key.
WITH held AS MATERIALIZED (
    SELECT q.*
      FROM {bands}
     CROSS JOIN LATERAL (
           SELECT msg_id, read_ct, message, headers
             FROM pgmq.{queue}
            WHERE vt > pg_catalog.now() + shift - pg_catalog.make_interval(secs => %(past)s)
              AND vt <= pg_catalog.now() + shift + pg_catalog.make_interval(secs => %(lease)s)
              AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
           OFFSET 0) q
    UNION
    SELECT msg_id, read_ct, message, headers
      FROM pgmq.{queue}
     WHERE msg_id = ANY (%(running)s::bigint[])
       AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
)
SELECT h.msg_id, h.read_ct, c.id, c.command_id, c.command_type, NULL, least(c.attempt_base, 2000000000), c.waived, c.max_attempts,
       c.correlation_id, c.reply_to, NULL, pg_catalog.date_part('epoch', c.created_at), false,
       NULLIF(h.headers ? 'before'::text, false), NULL, pg_catalog.now(), pg_catalog.now(), c.timeout, c.suspect,
       c.step, c.batch, false, c.quarantine, c.alone,
       CASE WHEN c.expires_at IS NOT NULL OR c.snoozes IS NOT NULL OR c.on_exhausted IS NOT NULL
                 OR c.key IS NOT NULL OR c.single
            THEN pg_catalog.json_build_array(extract(epoch FROM c.expires_at - pg_catalog.now()), c.on_exhausted,
                     c.snoozes, extract(epoch FROM pg_catalog.now() - c.snoozed_at), c.key_limit, c.key,
                     c.single, 'RELEASED')::text END,
       NULL, NULL, NULL, h.headers ? 'cancel'::text, h.headers -> 'cancel'::text ->> 'by'::text,
       h.headers -> 'cancel'::text ->> 'reason'::text
  FROM held h
  LEFT JOIN LATERAL (
       SELECT *
         FROM commandbus.command
        WHERE id = CASE WHEN pg_catalog.jsonb_typeof(h.message -> 'command'::text) IN ('number', 'string')
                             AND h.message ->> 'command'::text ~ '^[0-9]{1,18}$'
                        THEN (h.message ->> 'command'::text)::bigint END
       OFFSET 0) c ON c.msg_id = h.msg_id AND c.domain = %(domain)s AND c.status OPERATOR(pg_catalog.=) 'PENDING'
 ORDER BY h.msg_id
