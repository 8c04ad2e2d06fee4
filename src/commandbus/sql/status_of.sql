-- The status of one command, with IN_PROGRESS derived from its queue row. Locks: none. Indexes: keys.
SELECT CASE WHEN c.status = 'PENDING' AND q.headers ? 'held_by' THEN 'IN_PROGRESS' ELSE c.status::text END,
       CASE WHEN jsonb_typeof(q.headers -> 'held_by') = 'string' THEN q.headers ->> 'held_by' END,
       to_char(q.vt AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'),
       q.headers -> 'cancel' ->> 'by'
  FROM commandbus.command c
  LEFT JOIN pgmq.{queue} q ON q.msg_id = c.msg_id
 WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s
