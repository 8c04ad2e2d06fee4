-- Where the permits of Redis limits are kept, and for how many more seconds only holders of a permit may go on.
-- Locks: none. Index: limit_mode_pkey.
SELECT mode, epoch, extract(epoch FROM until - pg_catalog.clock_timestamp())::float8
  FROM commandbus.limit_mode
 WHERE id = 1
