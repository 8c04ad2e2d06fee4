-- What a rehearsal gives to a handler: the command, the number of its last attempt, its last checkpoint, and the receipts of its
-- effects. Locks: none. Indexes: command_domain_command_id_key; the keys of checkpoint and effect.
SELECT c.id, c.command_type, c.data::text, c.headers::text, c.correlation_id, c.reply_to, c.max_attempts, c.timeout,
       extract(epoch FROM c.created_at)::float8, COALESCE(c.attempt, c.attempt_base),
       (SELECT k.value::text FROM commandbus.checkpoint k WHERE k.command = c.id),
       (SELECT pg_catalog.json_object_agg(e.name, e.receipt) FROM commandbus.effect e
         WHERE e.command = c.id AND e.receipt IS NOT NULL)::text
  FROM commandbus.command c
 WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s
