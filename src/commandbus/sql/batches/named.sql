-- One batch by its name. Locks: none. Indexes: batch_domain_batch_id_key, batch_delta_batch.
SELECT id, domain, batch_id, name, holds, status, is_open, total, completed, failed, canceled, in_tsq, rate, rate_age,
       rate_count, created_at, started_at, finished_at, custom_data, on_complete, cancel, retry_of
  FROM commandbus.batch_named(%(domain)s, %(batch_id)s, %(running)s)
