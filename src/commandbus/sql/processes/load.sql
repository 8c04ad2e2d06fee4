-- A process and its steps, for the code that moves it; and whether a message is one of its own. Only this package writes
-- the columns that say so, so a message from another program is not. Locks: none; the move names the version that was
-- read. Indexes: process_domain_process_id_key, process_step's key.
SELECT p.id, p.process_id, p.process_type, p.status, p.version, p.is_compensating, p.data::text, p.state::text,
       p.cancel::text, p.failure::text, p.created_at, p.deadline_at, p.batch, p.reply_to, p.correlation_id, p.timer, p.parent, p.parent_step, p.root, p.depth,
       (SELECT pg_catalog.json_agg(pg_catalog.json_build_object(
                                          'number', number, 'name', name, 'undoes', undoes, 'status', status,
                                          'closed', closed, 'result', result, 'error', error, 'domain', domain,
                                          'command_id', command_id, 'timer', timer,
                                          'waits', CASE WHEN kind IS NOT NULL THEN
                                                       pg_catalog.json_build_array(kind, command_type) END)
                                      ORDER BY number)
          FROM commandbus.process_step WHERE process = p.id)::text,
       EXISTS (SELECT FROM commandbus.command c WHERE c.id = %(message)s::bigint AND c.process = p.id AND c.step = 0)
  FROM commandbus.process p
 WHERE p.domain = %(domain)s AND p.process_id = %(process_id)s
