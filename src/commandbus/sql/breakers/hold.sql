-- The breakers of some command types that are not closed, held until the parking that follows has committed.
-- Locks: these rows, FOR SHARE: a closing (an update of the row) waits for us and then finds what we parked; if it came
-- first, we wait and find the breaker closed. Index: breaker_pkey.
SELECT command_type, state, is_forced, until, reason, probe, pg_catalog.clock_timestamp()
  FROM commandbus.breaker
 WHERE domain = %(domain)s AND command_type = ANY (%(types)s) AND state <> 'CLOSED'
   FOR SHARE
