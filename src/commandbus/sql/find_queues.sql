-- Which of these PGMQ queues exist and may be written to (a queue that another client made is granted to nobody).
-- Locks: none.
SELECT queue FROM unnest(%(queues)s::text[]) AS queue
 WHERE has_table_privilege(to_regclass('pgmq.q_' || queue), 'INSERT')
