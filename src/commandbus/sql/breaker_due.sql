-- The breakers of some domains that will move by themselves: in how many seconds they are due, and what became of their
-- probe's command. Locks: none. Indexes: breaker_pkey, the command's key.
SELECT b.domain, b.command_type, b.state, extract(epoch FROM b.until - pg_catalog.clock_timestamp())::float8,
       c.status::text
  FROM commandbus.breaker b
  LEFT JOIN commandbus.command c ON c.id = b.probe
 WHERE b.domain = ANY (%(domains)s) AND b.state <> 'CLOSED' AND NOT b.is_forced
