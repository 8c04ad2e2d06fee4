-- The metrics of a PGMQ queue, like pgmq.metrics. How many were ever sent is null for a role that may not use the
-- queue's sequence. Locks: none. It reads the whole queue.
SELECT pg_catalog.count(*),
       pg_catalog.count(*) FILTER (WHERE {due} <= pg_catalog.clock_timestamp()),
       extract(epoch FROM pg_catalog.clock_timestamp() - pg_catalog.max(q.enqueued_at))::float8,
       extract(epoch FROM pg_catalog.clock_timestamp() - pg_catalog.min(q.enqueued_at))::float8,
       (SELECT CASE WHEN pg_catalog.has_sequence_privilege(s.seq, 'USAGE'::text)
                    THEN COALESCE(pg_catalog.pg_sequence_last_value(s.seq), 0) END
          FROM pg_catalog.to_regclass(%(sequence)s::text) AS s (seq)),
       pg_catalog.clock_timestamp()
  FROM pgmq.{queue} AS q
