-- Which of these PGMQ queues exist. Locks: none.
SELECT queue FROM unnest(%(queues)s::text[]) AS queue WHERE to_regclass('pgmq.q_' || queue) IS NOT NULL
