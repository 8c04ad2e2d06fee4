-- A page of batches, newest first, before a given id; or one batch by its name. The counts include what is not folded
-- yet. A PENDING batch is shown as IN_PROGRESS as soon as a member was settled or the batch is in `running`.
--
-- Locks: none. Indexes: batch's key backwards, or batch_domain_batch_id_key; batch_delta_batch.
SELECT b.id, b.domain, b.batch_id, b.name, b.holds, shown.status, b.is_open, b.total + d.total, b.completed + d.completed,
       b.failed + d.failed, b.canceled + d.canceled, greatest(b.in_tsq + d.in_tsq, 0), b.rate,
       extract(epoch FROM pg_catalog.clock_timestamp() - b.rate_at)::float8, b.rate_count, b.created_at,
       b.started_at, b.finished_at,
       b.custom_data::text, b.on_complete::text, b.cancel::text,
       (SELECT o.batch_id FROM commandbus.batch o WHERE o.id = b.retry_of)
  FROM commandbus.batch b
 CROSS JOIN LATERAL (
       SELECT COALESCE(pg_catalog.sum(total), 0)::bigint AS total,
              COALESCE(pg_catalog.sum(completed), 0)::bigint AS completed,
              COALESCE(pg_catalog.sum(failed), 0)::bigint AS failed,
              COALESCE(pg_catalog.sum(canceled), 0)::bigint AS canceled,
              COALESCE(pg_catalog.sum(in_tsq), 0)::bigint AS in_tsq,
              COALESCE(pg_catalog.bool_or(completed <> 0 OR failed <> 0 OR canceled <> 0 OR in_tsq <> 0),
                       false) AS has_moved
         FROM commandbus.batch_delta
        WHERE batch = b.id) d
 CROSS JOIN LATERAL (
       SELECT CASE WHEN b.status = 'PENDING' AND (d.has_moved OR b.id = ANY (%(running)s::bigint[])) THEN 'IN_PROGRESS'
                   ELSE b.status END AS status) shown
 WHERE (%(domain)s::text IS NULL OR b.domain = %(domain)s)
   AND (%(batch_id)s::text IS NULL OR b.batch_id = %(batch_id)s)
   AND (%(before_id)s::bigint IS NULL OR b.id < %(before_id)s) AND b.id >= %(after_id)s
   AND (%(status)s::text IS NULL OR shown.status = %(status)s)
 ORDER BY b.id DESC
 LIMIT %(limit)s
