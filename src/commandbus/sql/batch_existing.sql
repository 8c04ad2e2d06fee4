-- A batch by its name, with all members that were added to it. Locks: none. Indexes: batch_domain_batch_id_key,
-- batch_delta_batch.
SELECT b.id, b.total + COALESCE((SELECT pg_catalog.sum(d.total) FROM commandbus.batch_delta d
                                  WHERE d.batch = b.id), 0)::bigint,
       b.fingerprint, b.holds
  FROM commandbus.batch b
 WHERE b.domain = %(domain)s AND b.batch_id = %(batch_id)s
