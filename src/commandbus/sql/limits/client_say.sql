-- Adds a program, or records that it can or cannot reach Redis. From then on, the permits of a program without Redis are
-- counted here, so it reports them only once. Only under the lock of limit_mode. Locks: its row. Index: limit_client_pkey.
INSERT INTO commandbus.limit_client AS c (id, beat_at, lost_at, held, epoch)
VALUES (%(id)s, pg_catalog.clock_timestamp(), CASE WHEN %(is_lost)s THEN pg_catalog.clock_timestamp() END,
        %(held)s::jsonb, %(epoch)s)
ON CONFLICT (id) DO UPDATE
   SET beat_at = pg_catalog.clock_timestamp(),
       lost_at = CASE WHEN %(is_lost)s THEN COALESCE(c.lost_at, pg_catalog.clock_timestamp()) END,
       held = CASE WHEN %(is_lost)s AND c.lost_at IS NOT NULL THEN c.held ELSE excluded.held END,
       epoch = COALESCE(excluded.epoch, c.epoch)
