-- Schedules for people, by name. Locks: none. Indexes: schedule_pkey, command_pkey, schedule_declaration_pkey.
SELECT s.domain, s.name, s.command_type, s.cron, s.every, s.timezone, s.data, s.headers, s.correlation_id, s.reply_to,
       s.max_attempts, s.timeout, s.expires, s.on_exhausted,
       CASE s.priority WHEN 1 THEN 'high' WHEN 0 THEN 'normal' WHEN -1 THEN 'low' END, s.missed, s.overlap, s.most, s.is_declared, s.created_at, s.changed_at, s.next_at,
       s.last_fired, c.command_id, c.status::text, s.fired, s.skipped, s.waiting_since, s.note, s.noted_at,
       s.paused_at, s.paused_by, s.pause_reason,
       (SELECT pg_catalog.max(d.seen_at) FROM commandbus.schedule_declaration d
         WHERE d.domain = s.domain AND d.name = s.name AND s.is_declared),
       (SELECT pg_catalog.count(*) FROM commandbus.schedule_declaration d
         WHERE d.domain = s.domain AND d.name = s.name AND d.seen_at > pg_catalog.now() - interval '15 seconds'),
       CASE WHEN c.status OPERATOR(pg_catalog.=) 'PENDING' THEN c.msg_id END
  FROM commandbus.schedule s
  LEFT JOIN LATERAL (SELECT k.command_id, k.status, k.msg_id FROM commandbus.command k WHERE k.id = s.last_command OFFSET 0) c ON true
 WHERE (%(domain)s::text IS NULL OR s.domain = %(domain)s) AND (%(name)s::text IS NULL OR s.name = %(name)s)
   AND (%(after_domain)s::text IS NULL OR (s.domain, s.name) > (%(after_domain)s, %(after_name)s))
 ORDER BY s.domain, s.name
 LIMIT %(limit)s
