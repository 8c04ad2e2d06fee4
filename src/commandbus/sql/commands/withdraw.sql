-- A worker that has work again wants no notifications. This also deletes the requests of workers that are long dead.
-- Locks: its own rows; others' only if nobody else holds them.
DELETE FROM commandbus.waiting
 WHERE ctid = ANY (ARRAY(SELECT ctid FROM commandbus.waiting
                          WHERE worker = %(worker)s OR expires_at < pg_catalog.now() - interval '1 hour'
                            FOR UPDATE SKIP LOCKED))
