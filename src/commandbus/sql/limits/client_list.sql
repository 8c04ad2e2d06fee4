-- The programs that use Redis limits: since when, when last heard of, for how many seconds without Redis, and what they
-- hold, and in which epoch Redis knows of it. Each row also has the longest lease of those limits, and the clock.
-- Locks: none, or (with `locking`) all rows in key order. A program that writes its heartbeat at this moment is waited
-- for, or it waits for us and then sees what was decided. Index: limit_client_pkey; limits is small.
SELECT id, extract(epoch FROM started_at)::float8,
       extract(epoch FROM pg_catalog.clock_timestamp() - beat_at)::float8,
       extract(epoch FROM pg_catalog.clock_timestamp() - lost_at)::float8, held, epoch,
       (SELECT COALESCE(pg_catalog.max(lease), 0) FROM commandbus.limits WHERE store = 'redis'),
       extract(epoch FROM pg_catalog.clock_timestamp())::float8
  FROM commandbus.limit_client
 ORDER BY id
{locking}
