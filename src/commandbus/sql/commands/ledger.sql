-- What the ledger of one command is computed from, besides its attempts and operators' retries: its own row, its queue row while it
-- waits or runs, and the line of its key.
-- Locks: none. Indexes: command_domain_command_id_key, the queue's key, the key of keyed.
SELECT c.id, c.status::text, pg_catalog.clock_timestamp(), c.created_at, c.due_at, c.started_at, c.finished_at, c.attempt,
       c.attempt_base, c.worker, c.spans::text, q.read_ct,
       CASE WHEN pg_catalog.jsonb_typeof(q.headers -> 'held_by'::text) = 'string' THEN q.headers ->> 'held_by'::text END,
       CASE WHEN pg_catalog.jsonb_typeof(q.headers -> 'since'::text) = 'string' THEN q.headers ->> 'since'::text END,
       k.key_limit
  FROM commandbus.command c
  LEFT JOIN LATERAL (
       SELECT read_ct, headers FROM pgmq.{queue} WHERE msg_id = c.msg_id OFFSET 0) q ON c.status OPERATOR(pg_catalog.=) 'PENDING'
  LEFT JOIN LATERAL (
       SELECT key_limit, state FROM commandbus.keyed WHERE command = c.id OFFSET 0) k ON k.state IN ('NEW', 'WAITING')
 WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s
