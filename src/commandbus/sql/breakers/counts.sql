-- The counts of workers for one command type: whether the worker is alive, when it sent its counts, and the counts.
-- Workers that ended or died since a given moment are included: their last counts still count.
-- Locks: none. `worker` has a row for each worker of a day.
SELECT is_live, extract(epoch FROM heartbeat_at)::float8, counts
  FROM (SELECT state <> 'STOPPED'
               AND heartbeat_at > pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => %(alive)s) AS is_live,
               heartbeat_at, counts -> %(name)s::text AS counts
          FROM commandbus.worker
         WHERE %(domain)s = ANY (domains)) w
 WHERE is_live OR heartbeat_at >= pg_catalog.to_timestamp(%(since)s)
