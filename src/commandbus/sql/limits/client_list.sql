-- The programs that use Redis limits: since when, last heard of, and without Redis for how many seconds, what they
-- hold; and, in each row, the longest lease of those limits and the clock.
-- Locks: none, or (where `locking` is put in) all rows in the order of their key: one that says at this moment that it is
-- alive is waited for, or waits and then sees what was decided. Index: limit_client_pkey; limits is small.
SELECT id, extract(epoch FROM started_at)::float8,
       extract(epoch FROM pg_catalog.clock_timestamp() - beat_at)::float8,
       extract(epoch FROM pg_catalog.clock_timestamp() - lost_at)::float8, held,
       (SELECT COALESCE(pg_catalog.max(lease), 0) FROM commandbus.limits WHERE store = 'redis'),
       extract(epoch FROM pg_catalog.clock_timestamp())::float8
  FROM commandbus.limit_client
 ORDER BY id
{locking}
