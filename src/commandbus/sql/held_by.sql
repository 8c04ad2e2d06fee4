-- What a dead worker still holds in one domain, with what is needed to settle it; a message that is no command yet
-- comes without one.
--
-- Locks: none; who settles is fenced. Indexes: q_*_vt_idx, between a moment before the death and the longest lease
-- that an attempt has without asking for more; the queue's key for those that ran, whose leases may be longer; the
-- command's key.
WITH held AS MATERIALIZED (
    SELECT msg_id, read_ct, message, headers
      FROM pgmq.{queue}
     WHERE vt > now() - make_interval(secs => %(past)s)
       AND vt <= now() + make_interval(secs => %(lease)s)
       AND headers ->> 'held_by' = %(worker)s
    UNION
    SELECT msg_id, read_ct, message, headers
      FROM pgmq.{queue}
     WHERE msg_id = ANY (%(running)s::bigint[])
       AND headers ->> 'held_by' = %(worker)s
)
SELECT h.msg_id, h.read_ct, c.id, c.command_id, c.command_type, NULL, c.attempt_base, c.waived, c.max_attempts,
       c.correlation_id, c.reply_to, NULL, c.created_at, false, (h.headers -> 'before')::text,
       CASE WHEN c.id IS NULL THEN h.message::text END, now(), now(), c.timeout, c.suspect,
       c.step, c.batch, false, c.quarantine, c.alone,
       h.headers ? 'cancel', h.headers -> 'cancel' ->> 'by', h.headers -> 'cancel' ->> 'reason'
  FROM held h
  LEFT JOIN LATERAL (
       SELECT *
         FROM commandbus.command
        WHERE id = CASE WHEN h.message ->> 'command' ~ '^[0-9]{1,18}$'
                        THEN (h.message ->> 'command')::bigint END
       OFFSET 0) c ON c.msg_id = h.msg_id AND c.domain = %(domain)s
 ORDER BY h.msg_id
