-- A batch by its name, with all members that were added to it, and whether it is the same. Locks: none.
-- Indexes: batch_domain_batch_id_key, batch_delta_batch.
SELECT id, total, is_same, holds FROM commandbus.compare_batch(%(domain)s, %(batch_id)s, %(fingerprint)s)
