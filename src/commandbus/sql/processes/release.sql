-- Counts commands of processes that have left the troubleshooting queue (one entry of `processes` each). A process that has
-- no command left there goes back to its former status. Returns the batches of these processes.
--
-- Locks: process rows in key order. Index: the key.
WITH left_it AS MATERIALIZED (
    SELECT process, pg_catalog.count(*) AS n
      FROM pg_catalog.unnest(%(processes)s::bigint[]) AS process GROUP BY process
), locked AS MATERIALIZED (
    SELECT id FROM commandbus.process WHERE id IN (SELECT process FROM left_it) ORDER BY id FOR NO KEY UPDATE
), released AS (
    UPDATE commandbus.process p
       SET in_tsq = greatest(p.in_tsq - n, 0), updated_at = pg_catalog.now(),
           status = CASE WHEN p.in_tsq > n OR p.status <> 'WAITING_FOR_TSQ' THEN p.status
                         WHEN p.is_compensating THEN 'COMPENSATING'
                         WHEN EXISTS (SELECT FROM commandbus.process_step s WHERE s.process = p.id AND s.status = 'SENT')
                             THEN 'WAITING_FOR_REPLY'
                         WHEN p.started_at IS NULL THEN 'PENDING'
                         ELSE 'IN_PROGRESS' END
      FROM left_it
     WHERE p.id = left_it.process AND p.id IN (SELECT id FROM locked)
    RETURNING p.batch, p.in_tsq, p.finished_at
)
SELECT batch FROM released WHERE batch IS NOT NULL AND in_tsq = 0 AND finished_at IS NULL
