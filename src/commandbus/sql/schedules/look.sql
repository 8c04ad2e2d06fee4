-- The schedules of these domains that come next, in the order of time: which are due by the server's clock, and in how many
-- seconds the others are due. For those that are due, also the status of their last commands.
--
-- Locks: none. Indexes: schedule_next, command_pkey.
SELECT s.domain, s.name, s.cron, s.every, s.timezone, s.missed, s.overlap, s.most, s.version, s.passed_at,
       s.waiting_since, s.last_status, s.now,
       extract(epoch FROM s.next_at - s.now)::float8 AS seconds
  FROM (SELECT first.*, t.now,
               (SELECT c.status::text FROM commandbus.command c
                 WHERE first.next_at <= t.now AND first.overlap <> 'allow' AND c.id = first.last_command) AS last_status
          FROM (SELECT pg_catalog.clock_timestamp() AS now OFFSET 0) t
         CROSS JOIN pg_catalog.unnest(%(domains)s::text[]) AS d(name)
         CROSS JOIN LATERAL (
               SELECT * FROM commandbus.schedule
                WHERE domain = d.name AND paused_at IS NULL AND next_at IS NOT NULL
                ORDER BY next_at LIMIT %(n)s) first
       ) s
 ORDER BY s.next_at
 LIMIT %(n)s
