-- What has this id: commands, batches and processes of these domains, workers, and the newest command with it as its correlation id.
-- Locks: none. Indexes: the unique keys of domain and id; worker's key; command_correlation.
SELECT 'command', c.domain, c.command_id
  FROM commandbus.command c WHERE c.domain = ANY (%(domains)s::text[]) AND c.command_id = %(id)s
UNION ALL
SELECT 'batch', b.domain, b.batch_id
  FROM commandbus.batch b WHERE b.domain = ANY (%(domains)s::text[]) AND b.batch_id = %(id)s
UNION ALL
SELECT 'process', p.domain, p.process_id
  FROM commandbus.process p WHERE p.domain = ANY (%(domains)s::text[]) AND p.process_id = %(id)s
UNION ALL
SELECT 'worker', '', w.id
  FROM commandbus.worker w WHERE w.id = %(id)s
UNION ALL
SELECT * FROM (SELECT 'correlation', c.domain, c.correlation_id
                 FROM commandbus.command c
                WHERE c.correlation_id = %(id)s AND c.domain = ANY (%(domains)s::text[])
                ORDER BY c.correlation_id, c.id DESC
                LIMIT 1) newest
