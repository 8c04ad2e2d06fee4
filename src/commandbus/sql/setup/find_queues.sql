-- Which of these PGMQ queues exist and may be written to (a queue that another client made is granted to nobody).
-- Locks: none.
SELECT queue FROM pg_catalog.unnest(%(queues)s::text[]) AS queue
 WHERE pg_catalog.has_table_privilege(pg_catalog.to_regclass('pgmq.q_' || queue), 'INSERT')
