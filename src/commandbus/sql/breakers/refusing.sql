-- The breakers of a domain that forbid sending now (`on_open="refuse"`). Locks: none. Index: breaker_pkey.
SELECT command_type, state, is_forced, until, reason, pg_catalog.clock_timestamp()
  FROM commandbus.breaker
 WHERE domain = %(domain)s AND state <> 'CLOSED'
   AND (is_forced OR state = 'HALF_OPEN' OR until > pg_catalog.clock_timestamp())
