-- Records that a program is alive, and (unless `held` is null) what it may hold. Returns whether it counts as a program
-- that cannot reach Redis; no row if the program is not known. Locks: its row. Index: limit_client_pkey.
UPDATE commandbus.limit_client
   SET beat_at = pg_catalog.clock_timestamp(), held = COALESCE(%(held)s::jsonb, held)
 WHERE id = %(id)s
RETURNING lost_at IS NOT NULL
