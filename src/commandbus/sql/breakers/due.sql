-- The breakers of some domains that need work. These are breakers that will move by themselves (in how many seconds,
-- and what became of the probe's command), and closed breakers that have counted something within their window.
-- Locks: none. Indexes: breaker_pkey, the command's key.
SELECT b.domain, b.command_type, b.state, extract(epoch FROM b.until - t.at)::float8, c.status::text, b.recent,
       extract(epoch FROM t.at)::float8
  FROM commandbus.breaker b
 CROSS JOIN (SELECT pg_catalog.clock_timestamp() AS at) t
  LEFT JOIN commandbus.command c ON c.id = b.probe
 WHERE b.domain = ANY (%(domains)s)
   AND ((b.state <> 'CLOSED' AND NOT b.is_forced) OR (b.state = 'CLOSED' AND b.counted_until > t.at))
