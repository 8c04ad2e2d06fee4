-- Finds a batch by its name. Returns how many members were added to it in all, and whether it is the same batch.
-- Locks: none. Indexes: batch_domain_batch_id_key, batch_delta_batch.
SELECT id, total, is_same, holds FROM commandbus.compare_batch(%(domain)s, %(batch_id)s, %(fingerprint)s)
