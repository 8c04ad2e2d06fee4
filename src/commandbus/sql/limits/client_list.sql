-- The programs that use Redis limits: their start, their last heartbeat, for how many seconds they have been without Redis,
-- what they hold, and the epoch in which Redis knows it. Each row also has the longest lease of those limits, and the
-- clock. Locks: none, or (with `locking`) all rows in key order. If a program writes its heartbeat at this moment, either
-- we wait for it, or it waits for us and then sees what was decided. Index: limit_client_pkey; limits is small.
SELECT id, extract(epoch FROM started_at)::float8,
       extract(epoch FROM pg_catalog.clock_timestamp() - beat_at)::float8,
       extract(epoch FROM pg_catalog.clock_timestamp() - lost_at)::float8, held, epoch,
       (SELECT COALESCE(pg_catalog.max(lease), 0) FROM commandbus.limits WHERE store = 'redis'),
       extract(epoch FROM pg_catalog.clock_timestamp())::float8
  FROM commandbus.limit_client
 ORDER BY id
{locking}
