-- Which of these PGMQ queues exist, and which may this role write to? (Nobody has rights on a queue that another client
-- made.) Locks: none.
SELECT queue FROM pg_catalog.unnest(%(queues)s::text[]) AS queue
 WHERE pg_catalog.has_table_privilege(pg_catalog.to_regclass('pgmq.q_' || queue), 'INSERT')
