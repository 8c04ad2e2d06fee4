-- The part of commands/settle_final.sql about batches and processes. Members are counted in batch_delta, one row per batch
-- and statement. A process waits while one of its commands is in the troubleshooting queue.
--
-- Locks: process rows in key order, after the command rows; new rows of batch_delta. Indexes: process's key.
), halting AS MATERIALIZED (
    SELECT id, batch, in_tsq, finished_at FROM commandbus.process
     WHERE id IN (SELECT process FROM settled WHERE process IS NOT NULL AND s = 'IN_TROUBLESHOOTING_QUEUE')
     ORDER BY id
       FOR NO KEY UPDATE
), halted AS (
    UPDATE commandbus.process p
       SET status = CASE WHEN p.finished_at IS NULL THEN 'WAITING_FOR_TSQ' ELSE p.status END,
           updated_at = pg_catalog.now(),
           in_tsq = p.in_tsq + (SELECT pg_catalog.count(*) FROM settled
                                 WHERE process = p.id AND s = 'IN_TROUBLESHOOTING_QUEUE')
     WHERE p.id IN (SELECT id FROM halting)
), counted AS (
    INSERT INTO commandbus.batch_delta (batch, completed, failed, canceled, in_tsq)
    SELECT batch, pg_catalog.count(*) FILTER (WHERE s = 'COMPLETED'),
           pg_catalog.count(*) FILTER (WHERE s = 'FAILED'),
           pg_catalog.count(*) FILTER (WHERE s = 'CANCELED'),
           pg_catalog.count(*) FILTER (WHERE s = 'IN_TROUBLESHOOTING_QUEUE')
      FROM (SELECT batch, s FROM settled WHERE batch IS NOT NULL
            UNION ALL
            SELECT batch, 'IN_TROUBLESHOOTING_QUEUE' FROM halting
             WHERE batch IS NOT NULL AND in_tsq = 0 AND finished_at IS NULL) m
     GROUP BY batch
