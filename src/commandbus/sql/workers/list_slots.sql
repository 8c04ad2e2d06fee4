-- What the slots of live workers run, as published in the last seconds. Locks: none. Indexes: the keys; both tables have a
-- row for each worker.
SELECT w.id, s.taken_at, extract(epoch FROM pg_catalog.now() - s.taken_at)::float8, s.state::text
  FROM commandbus.worker w
  JOIN commandbus.worker_slots s ON s.worker = w.id
 WHERE w.state <> 'STOPPED'
   AND w.heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s)
   AND s.taken_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(fresh)s)
 ORDER BY w.host, w.supervisor, w.started_at, w.id
 LIMIT %(most)s
