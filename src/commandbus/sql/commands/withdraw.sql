-- A worker that has work takes its request for notifications back, and clears those of workers long dead.
-- Locks: its own rows; others' only if nobody else holds them.
DELETE FROM commandbus.waiting
 WHERE ctid = ANY (ARRAY(SELECT ctid FROM commandbus.waiting
                          WHERE worker = %(worker)s OR expires_at < pg_catalog.now() - interval '1 hour'
                            FOR UPDATE SKIP LOCKED))
