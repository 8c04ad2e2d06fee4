-- The commands of a process's outstanding steps, and its own messages (step 0). For a retry: those in the
-- troubleshooting queue. For a process that has ended: all that are left, so that they can be ended.
-- Locks: none. Indexes: the keys, command_process.
SELECT p.id, s.domain, s.command_id, false
  FROM commandbus.process p JOIN commandbus.process_step s ON s.process = p.id
 WHERE p.domain = %(domain)s AND p.process_id = %(process_id)s AND s.status = 'SENT' AND s.kind IS NULL
UNION ALL
SELECT p.id, c.domain, c.command_id, p.finished_at IS NULL
  FROM commandbus.process p JOIN commandbus.command c ON c.process = p.id
 WHERE p.domain = %(domain)s AND p.process_id = %(process_id)s AND c.step = 0
   AND (c.status OPERATOR(pg_catalog.=) 'IN_TROUBLESHOOTING_QUEUE'
        OR (p.finished_at IS NOT NULL AND c.status OPERATOR(pg_catalog.=) 'PENDING'))
