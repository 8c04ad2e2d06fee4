-- How many messages of a queue's PGMQ archive are older than a moment, up to `most`. Locks: none. Index: archived_at_idx_*.
SELECT pg_catalog.count(*)
  FROM (SELECT FROM pgmq.{archive} WHERE archived_at < %(before)s::timestamptz LIMIT %(most)s) old
