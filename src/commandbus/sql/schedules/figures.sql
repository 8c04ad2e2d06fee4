-- Schedules in figures, for metrics: by how many seconds each is late, commands that it sent, firings that it skipped; at
-- most so many of them. Locks: none. Index: schedule_pkey.
SELECT domain, name,
       CASE WHEN paused_at IS NULL AND next_at < pg_catalog.now()
            THEN extract(epoch FROM pg_catalog.now() - next_at)::float8 ELSE 0 END,
       fired, skipped
  FROM commandbus.schedule
 WHERE domain = ANY (%(domains)s::text[])
 ORDER BY domain, name
 LIMIT %(most)s
