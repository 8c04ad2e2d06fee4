-- Workers that died, the newest first. Locks: none. Index: worker_died.
SELECT id, host, supervisor, died_at, death
  FROM commandbus.worker
 WHERE death IS NOT NULL
 ORDER BY died_at DESC, id
 LIMIT %(most)s
