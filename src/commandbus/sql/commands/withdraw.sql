-- Ends the notifications for a worker that has work again. Also deletes the requests of workers that died long ago.
-- Locks: its own rows; rows of other workers only if no other transaction has locked them.
DELETE FROM commandbus.waiting
 WHERE ctid = ANY (ARRAY(SELECT ctid FROM commandbus.waiting
                          WHERE worker = %(worker)s OR expires_at < pg_catalog.now() - interval '1 hour'
                            FOR UPDATE SKIP LOCKED))
