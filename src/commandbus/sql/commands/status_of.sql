-- The status of one command, with IN_PROGRESS derived from its queue row. Locks: none. Indexes: keys.
SELECT CASE WHEN c.status OPERATOR(pg_catalog.=) 'PENDING' AND q.headers ? 'held_by'::text THEN 'IN_PROGRESS'
            ELSE c.status::text END,
       CASE WHEN pg_catalog.jsonb_typeof(q.headers -> 'held_by'::text) = 'string'
            THEN q.headers ->> 'held_by'::text END,
       pg_catalog.to_char({due_at} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'),
       q.headers -> 'cancel'::text ->> 'by'::text
  FROM commandbus.command c
  LEFT JOIN pgmq.{queue} q ON q.msg_id = c.msg_id
 WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s
