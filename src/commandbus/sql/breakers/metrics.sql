-- The metrics of breakers of command types: whether each is open, how many attempts in its window were stuck, and how
-- many commands it keeps parked (counted up to `most`). Locks: none. Indexes: breaker_pkey, parked_reason.
SELECT b.domain, b.command_type, b.state <> 'CLOSED',
       (SELECT pg_catalog.count(*) FROM pg_catalog.jsonb_array_elements(b.recent) x
         WHERE (x ->> 1)::boolean
           AND (x ->> 3)::float8 > extract(epoch FROM pg_catalog.now())::float8 - b.window_seconds),
       (SELECT pg_catalog.count(*) FROM (SELECT FROM commandbus.parked p
                               WHERE p.reason = 'breaker' AND p.domain = b.domain AND p.command_type = b.command_type
                               LIMIT %(most)s) x)
  FROM commandbus.breaker b
 WHERE b.domain = ANY (%(domains)s::text[])
 ORDER BY 1, 2
