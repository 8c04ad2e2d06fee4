-- A page of commands, newest first, before a given id. Locks: none. Index: the key, backwards, filtering; or
-- command_domain_command_id_key where the domain is rare (the planner's choice); command_batch for a batch's members.
SELECT c.id, c.domain, c.command_id, c.command_type, c.status::text, c.data::text, c.result::text, c.correlation_id,
       c.reply_to, c.headers::text, c.max_attempts, c.attempt, c.attempt_base, c.created_at, c.started_at,
       c.finished_at, c.worker, c.msg_id, a.error_type, a.error_code, a.error, c.timeout,
       (SELECT b.batch_id FROM commandbus.batch b WHERE b.id = c.batch), c.waived,
       CASE WHEN c.alone THEN 'alone' WHEN c.suspect IS NOT NULL THEN 'suspect' WHEN c.quarantine THEN 'quarantine' END,
       c.expires_at, c.on_exhausted, c.snoozes, c.priority
  FROM commandbus.command c
  LEFT JOIN LATERAL (
       SELECT error_type, error_code, error FROM commandbus.attempt
        WHERE command = c.id AND verdict NOT IN ('GIVEN_BACK', 'PARKED')
          AND c.status OPERATOR(pg_catalog.<>) 'COMPLETED'
        ORDER BY number DESC, finished_at DESC LIMIT 1) a ON true
 WHERE (%(domain)s::text IS NULL OR c.domain = %(domain)s)
   AND (%(command_id)s::text IS NULL OR c.command_id = %(command_id)s)
   AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s)
   AND (%(correlation_id)s::text IS NULL OR c.correlation_id = %(correlation_id)s)
   AND (%(status)s::text IS NULL OR c.status::text = %(status)s)
   AND (%(priority)s::smallint IS NULL OR COALESCE(c.priority, 0::smallint) = %(priority)s::smallint)
   AND (%(created_after)s::timestamptz IS NULL OR c.created_at >= %(created_after)s)
   AND (%(created_before)s::timestamptz IS NULL OR c.created_at < %(created_before)s)
   AND (%(ids)s::bigint[] IS NULL OR c.id = ANY (%(ids)s::bigint[]))
   AND (%(not_ids)s::bigint[] IS NULL OR c.id <> ALL (%(not_ids)s::bigint[]))
   AND (%(before_id)s::bigint IS NULL OR c.id < %(before_id)s)
   {of_batch}
 ORDER BY {order}
 LIMIT %(limit)s
