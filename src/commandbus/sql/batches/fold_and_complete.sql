-- Adds the deltas of batches to their rows, and finishes the batches that are complete. A batch is complete when it is
-- closed and all its members are final. Returns the batches that it could lock. The others are locked by another
-- transaction, and must be folded again. A batch without a delta is left as it is (closing a batch writes a delta of
-- zeros).
--
-- Locks: batch rows in key order, SKIP LOCKED, then their deltas. A delta that was committed after our snapshot stays
-- for the next fold. Members are added only before the close, and the fold of the close sees them all, so a row that
-- says "closed" misses none. Indexes: batch's key, batch_delta_batch. The rate is a moving average over about ten
-- seconds. It begins with the first member that is final.
WITH locked AS MATERIALIZED (
    SELECT id FROM commandbus.batch
     WHERE id = ANY (%(batches)s::bigint[])
     ORDER BY id
       FOR NO KEY UPDATE SKIP LOCKED
), moment AS MATERIALIZED (
    SELECT pg_catalog.clock_timestamp() AS at
), gone AS (
    DELETE FROM commandbus.batch_delta WHERE batch = ANY (ARRAY(SELECT id FROM locked))
    RETURNING batch, total, completed, failed, canceled, in_tsq
), sums AS (
    SELECT batch AS id, pg_catalog.sum(total) AS total, pg_catalog.sum(completed) AS completed,
           pg_catalog.sum(failed) AS failed,
           pg_catalog.sum(canceled) AS canceled, pg_catalog.sum(in_tsq) AS in_tsq,
           pg_catalog.sum(completed + failed + canceled) AS finished,
           pg_catalog.bool_or(completed <> 0 OR failed <> 0 OR canceled <> 0 OR in_tsq <> 0) AS has_moved
      FROM gone
     GROUP BY batch
), folded AS (
    UPDATE commandbus.batch b
       SET total = b.total + s.total, completed = b.completed + s.completed, failed = b.failed + s.failed,
           canceled = b.canceled + s.canceled, in_tsq = b.in_tsq + s.in_tsq,
           started_at = CASE WHEN s.has_moved THEN COALESCE(b.started_at, (SELECT at FROM moment)) ELSE b.started_at END,
           status = CASE
               WHEN b.is_open OR b.completed + b.failed + b.canceled + s.finished < b.total + s.total
                   THEN CASE WHEN b.started_at IS NOT NULL OR s.has_moved THEN 'IN_PROGRESS' ELSE 'PENDING' END
               WHEN b.cancel IS NOT NULL THEN 'CANCELED'
               WHEN b.failed + b.canceled + s.failed + s.canceled > 0 THEN 'COMPLETED_WITH_FAILURES'
               ELSE 'COMPLETED' END,
           finished_at = CASE
               WHEN b.is_open OR b.completed + b.failed + b.canceled + s.finished < b.total + s.total
                   THEN NULL ELSE COALESCE(b.finished_at, (SELECT at FROM moment)) END,
           rate = CASE WHEN b.rate_at IS NULL OR b.rate_at > (SELECT at FROM moment) - interval '1 second' THEN b.rate
                       ELSE commandbus.moving_rate(b.rate, b.rate_at, b.rate_count,
                                                   b.completed + b.failed + b.canceled + s.finished) END,
           rate_count = CASE WHEN b.rate_at IS NULL THEN 0
                             WHEN b.rate_at > (SELECT at FROM moment) - interval '1 second' THEN b.rate_count
                             ELSE b.completed + b.failed + b.canceled + s.finished END,
           rate_at = CASE WHEN b.rate_at IS NULL AND b.completed + b.failed + b.canceled + s.finished = 0 THEN NULL
                          WHEN b.rate_at > (SELECT at FROM moment) - interval '1 second' THEN b.rate_at
                          ELSE (SELECT at FROM moment) END
      FROM sums s
     WHERE b.id = s.id AND b.id = ANY (ARRAY(SELECT id FROM locked))
    RETURNING b.id, b.domain, b.batch_id, b.name, b.status, b.total, b.completed, b.failed, b.canceled, b.custom_data,
              b.on_complete, b.in_tsq, b.on_complete IS NOT NULL AND b.completion_sent_at IS NULL
                  AND (b.finished_at IS NOT NULL
                       OR (b.completes_early AND NOT b.is_open
                           AND b.completed + b.failed + b.canceled + b.in_tsq >= b.total)) AS is_due
)
SELECT id, COALESCE(is_due, false), domain, batch_id, name, status, total, completed, failed, canceled, custom_data::text,
       on_complete::text, in_tsq
  FROM locked LEFT JOIN folded USING (id)
 ORDER BY id
