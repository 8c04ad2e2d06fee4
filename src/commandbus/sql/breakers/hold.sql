-- Reads which breakers of some command types are not closed, and keeps them so until the caller, which parks commands next,
-- has committed.
-- Locks: these rows, FOR SHARE. If somebody closes the breaker after us, that update waits for us and then finds the
-- commands that we parked. If that update came first, we wait and find the breaker closed. Index: breaker_pkey.
SELECT command_type, state, is_forced, until, reason, probe, pg_catalog.clock_timestamp()
  FROM commandbus.breaker
 WHERE domain = %(domain)s AND command_type = ANY (%(types)s) AND state <> 'CLOSED'
   FOR SHARE
