-- Where the permits of Redis limits are kept, for how many more seconds no new call may begin, and why.
-- Locks: none. Index: limit_mode_pkey.
SELECT mode, epoch, extract(epoch FROM until - pg_catalog.clock_timestamp())::float8, note
  FROM commandbus.limit_mode
 WHERE id = 1
