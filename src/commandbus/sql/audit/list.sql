-- A bite of what people and commandbus itself did: the newest entries of both tables before these ids, and which of them match.
-- Locks: none. Indexes: the keys of operator_action and control_action, backwards; the command's key.
SELECT 'command', o.id, o.performed_at, o.operator, o.action, o.reason, c.domain, c.command_id, c.command_type,
       COALESCE(c.domain || ' ' || c.command_id, 'command #' || o.command::text),
       pg_catalog.json_strip_nulls(pg_catalog.json_build_object('attempt', o.attempt, 'priority', o.priority))::text,
       (%(operator)s::text IS NULL OR o.operator = %(operator)s) AND (%(action)s::text IS NULL OR o.action = %(action)s)
           AND (%(domain)s::text IS NULL OR COALESCE(c.domain = %(domain)s, false))
           AND (%(since)s::timestamptz IS NULL OR o.performed_at >= %(since)s)
           AND (%(before)s::timestamptz IS NULL OR o.performed_at < %(before)s)
  FROM (SELECT * FROM commandbus.operator_action WHERE id < %(command_id)s::bigint ORDER BY id DESC LIMIT %(bite)s) o
  LEFT JOIN LATERAL (
       SELECT k.domain, k.command_id, k.command_type FROM commandbus.command k WHERE k.id = o.command OFFSET 0) c ON true
UNION ALL
SELECT 'control', a.id, a.performed_at, a.operator, a.action, a.reason, s.domain, NULL, NULL, a.subject, a.details::text,
       (%(operator)s::text IS NULL OR a.operator = %(operator)s) AND (%(action)s::text IS NULL OR a.action = %(action)s)
           AND (%(domain)s::text IS NULL OR COALESCE(s.domain = %(domain)s, false))
           AND (%(since)s::timestamptz IS NULL OR a.performed_at >= %(since)s)
           AND (%(before)s::timestamptz IS NULL OR a.performed_at < %(before)s)
  FROM (SELECT * FROM commandbus.control_action WHERE id < %(control_id)s::bigint ORDER BY id DESC LIMIT %(bite)s) a
 CROSS JOIN LATERAL (
       SELECT CASE WHEN pg_catalog.strpos(a.subject, '/'::text) > 0
                   THEN pg_catalog.split_part(pg_catalog.split_part(a.subject, ' '::text, 2), '/'::text, 1) END AS domain) s
