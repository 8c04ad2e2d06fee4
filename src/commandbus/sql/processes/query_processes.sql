-- A page of processes, newest first, before a given id. `longest` (null: any) is how many bytes of data and state are read at most; 0 is none,
-- and then they are not even looked at. `steps`, `troubles` and `characters` bound what is read of that. Locks: none. Index: the key, backwards, filtering; or
-- process_domain_process_id_key or process_batch.
SELECT p.id, p.domain, p.process_id, p.process_type, p.status, p.is_compensating,
       CASE WHEN %(longest)s::integer IS NULL THEN p.data::text WHEN %(longest)s = 0 THEN NULL
            WHEN pg_catalog.octet_length(p.data::text) <= %(longest)s THEN p.data::text END,
       CASE WHEN %(longest)s::integer IS NULL THEN p.state::text WHEN %(longest)s = 0 THEN NULL
            WHEN pg_catalog.octet_length(p.state::text) <= %(longest)s THEN p.state::text END,
       p.created_at, p.started_at, p.updated_at, p.finished_at, p.deadline_at, b.batch_id, p.reply_to, p.correlation_id,
       CASE WHEN %(longest)s::integer IS NULL OR pg_catalog.octet_length(p.failure::text) <= 4000 THEN p.failure::text END,
       p.cancel::text, p.in_tsq,
       (SELECT pg_catalog.json_agg(pg_catalog.json_build_object(
                   'number', s.number, 'name', s.name, 'undoes', s.undoes, 'domain', s.domain,
                   'command_id', s.command_id, 'command_type', s.command_type, 'kind', s.kind,
                   'sent_at', s.sent_at, 'deadline_at', s.deadline_at,
                   'nested', CASE WHEN s.kind = 'process' THEN
                       (SELECT n.status FROM commandbus.process n
                         WHERE n.domain = s.domain AND n.process_id = s.command_id) END) ORDER BY s.number)
          FROM (SELECT * FROM commandbus.process_step o WHERE o.process = p.id AND o.status = 'SENT'
                 ORDER BY o.number LIMIT %(steps)s::bigint) s)::text,
       CASE WHEN p.in_tsq > 0 THEN
           (SELECT pg_catalog.json_agg(pg_catalog.json_build_object(
                       'domain', t.domain, 'command_id', c.command_id, 'command_type', c.command_type,
                       'step', c.step, 'error_code', t.error_code, 'error', pg_catalog."left"(t.error, %(characters)s)) ORDER BY c.id)
              FROM (SELECT k.id, k.command_id, k.command_type, k.step FROM commandbus.command k
                     WHERE k.process = p.id AND k.status OPERATOR(pg_catalog.=) 'IN_TROUBLESHOOTING_QUEUE'
                     ORDER BY k.id LIMIT %(troubles)s::bigint) c
              JOIN commandbus.tsq t ON t.command = c.id) END::text,
       CASE WHEN p.finished_at IS NULL THEN
           (SELECT pg_catalog.json_build_object('command_id', c.command_id, 'number', a.number,
                                                'error', pg_catalog."left"(a.error, %(characters)s))
              FROM commandbus.command c
              JOIN commandbus.attempt a ON a.command = c.id
             WHERE c.process = p.id AND c.step = 0
               AND c.status OPERATOR(pg_catalog.=) 'PENDING' AND a.error IS NOT NULL
             ORDER BY a.finished_at DESC LIMIT 1) END::text,
       CASE WHEN p.parent IS NOT NULL THEN
           (SELECT pg_catalog.json_build_object('domain', n.domain, 'process_id', n.process_id,
                                                'step', pg_catalog.abs(p.parent_step))
              FROM commandbus.process n WHERE n.id = p.parent) END::text,
       CASE WHEN %(longest)s > 0 THEN pg_catalog.octet_length(p.data::text) END,
       CASE WHEN %(longest)s > 0 THEN pg_catalog.octet_length(p.state::text) END
  FROM commandbus.process p LEFT JOIN commandbus.batch b ON b.id = p.batch
 WHERE (%(domain)s::text IS NULL OR p.domain = %(domain)s)
   AND (%(process_id)s::text IS NULL OR p.process_id = %(process_id)s)
   AND (%(process_type)s::text IS NULL OR p.process_type = %(process_type)s)
   AND (%(status)s::text IS NULL OR p.status = %(status)s)
   AND (%(batch_id)s::text IS NULL OR b.batch_id = %(batch_id)s)
   AND (%(before_id)s::bigint IS NULL OR p.id < %(before_id)s) AND p.id >= %(after_id)s
 ORDER BY p.id DESC
 LIMIT %(limit)s
