-- In how many seconds the first message of a PGMQ queue can be read (0 or less: now; null: it is empty). Locks: none.
-- Index: the queue's index on vt.
SELECT extract(epoch FROM pg_catalog.min(q.vt) - pg_catalog.clock_timestamp())::float8 FROM pgmq.{queue} AS q
