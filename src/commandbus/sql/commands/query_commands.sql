-- A page of commands, newest first. The caller gives the condition and the order that suit the index which it means, and
-- then the filters. No condition is one that might hold for all (`x IS NULL OR …`), so every plan can use that index.
-- Locks: none. Index: command's key, command_domain_command_id_key, command_batch or command_correlation.
SELECT c.id, c.domain, c.command_id, c.command_type, c.status::text, c.data::text, c.result::text, c.correlation_id,
       c.reply_to, c.headers::text, c.max_attempts, c.attempt, c.attempt_base, c.created_at, c.started_at,
       c.finished_at, c.worker, c.msg_id, a.error_type, a.error_code, a.error, c.timeout,
       (SELECT b.batch_id FROM commandbus.batch b WHERE b.id = c.batch), c.waived,
       CASE WHEN c.alone THEN 'alone' WHEN c.suspect IS NOT NULL THEN 'suspect' WHEN c.quarantine THEN 'quarantine' END,
       c.expires_at, c.on_exhausted, c.snoozes, c.priority, c.key_limit, c.key, c.unique_rule::text,
       CASE WHEN c.unique_rule IS NOT NULL
            THEN EXISTS (SELECT FROM commandbus.unique_key u
                          WHERE u.domain = c.domain AND u.key = c.unique_rule ->> 'key'::text AND u.command = c.id) END
  FROM commandbus.command c
  LEFT JOIN LATERAL (
       SELECT error_type, error_code, error FROM commandbus.attempt
        WHERE command = c.id AND verdict NOT IN ('GIVEN_BACK', 'PARKED')
          AND c.status OPERATOR(pg_catalog.<>) 'COMPLETED'
        ORDER BY number DESC, finished_at DESC LIMIT 1) a ON true
 WHERE {range}
{filters} ORDER BY {order}
 LIMIT %(limit)s
