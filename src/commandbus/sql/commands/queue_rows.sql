-- The queue's side of some commands: when each is visible, how often it was read, who holds it, what it is parked for,
-- who asked to cancel it, the progress that its handler reported, and until when and why it is parked. If a breaker was
-- opened again after it parked a command, the breaker's present reason counts. For a command that a limit has parked, this
-- names the limit; the caller reads the state of that limit. A command whose turn has come (woken_at) is not parked
-- any more.
-- Locks: none. Indexes: the queue's key, parked_domain_msg_id_key, breaker_pkey.
SELECT q.msg_id, {due_at}, q.read_ct, CASE WHEN pg_catalog.jsonb_typeof(q.headers -> 'held_by'::text) = 'string'
                                       THEN q.headers ->> 'held_by'::text END,
       CASE WHEN pg_catalog.jsonb_typeof(q.headers -> 'since'::text) = 'string'
            THEN q.headers ->> 'since'::text END, p.reason,
       (q.headers -> 'cancel'::text)::text, (q.headers -> 'progress'::text)::text,
       COALESCE(b.until, p.until), p.note, p.limit_name, b.state, b.is_forced, b.reason
  FROM pgmq.{queue} q
  LEFT JOIN commandbus.parked p ON p.domain = %(domain)s AND p.msg_id = q.msg_id AND p.woken_at IS NULL
  LEFT JOIN commandbus.breaker b ON p.reason = 'breaker' AND b.domain = p.domain AND b.command_type = p.command_type
                                AND b.state <> 'CLOSED'
 WHERE q.msg_id = ANY (%(msg_ids)s::bigint[])
