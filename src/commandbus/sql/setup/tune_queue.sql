-- Makes autovacuum visit a queue often enough for its changes. Locks: SHARE UPDATE EXCLUSIVE on the queue, once, at its
-- creation.
ALTER TABLE pgmq.{queue} SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
                              autovacuum_vacuum_insert_scale_factor = 1, autovacuum_analyze_threshold = 1000)
