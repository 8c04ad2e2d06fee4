-- Locks a batch that the caller wants to change; see 0001_schema.sql. Locks: the batch row. Index:
-- batch_domain_batch_id_key.
SELECT id, is_open, status, is_finished, holds, cancel, sees_all
  FROM commandbus.lock_batch(%(domain)s, %(batch_id)s, %(locking)s)
