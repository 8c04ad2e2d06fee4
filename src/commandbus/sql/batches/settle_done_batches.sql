-- The part of commands/settle_done.sql about batches: members are counted in batch_delta, one row per batch and statement.
--
-- Locks: new rows of batch_delta.
), counted AS (
    INSERT INTO commandbus.batch_delta (batch, completed, failed, canceled, in_tsq)
    SELECT batch, pg_catalog.count(*), 0, 0, 0 FROM settled WHERE batch IS NOT NULL GROUP BY batch
