-- Batches that need work: those with something to fold, and those whose cancellation is not done. Leaves out batches that
-- could not be locked a moment ago.
--
-- Locks: none. Indexes: batch_delta_batch, batch_to_cancel.
(SELECT DISTINCT batch, NULL::text AS domain, NULL::text AS holds, NULL::text AS cancel
   FROM commandbus.batch_delta WHERE batch <> ALL (%(but)s::bigint[]) ORDER BY batch LIMIT %(limit)s)
UNION ALL
(SELECT id, domain, holds, cancel::text
   FROM commandbus.batch
  WHERE cancel IS NOT NULL AND finished_at IS NULL AND cancel ->> 'done'::text IS NULL
    AND id <> ALL (%(but)s::bigint[])
  ORDER BY id LIMIT %(limit)s)
