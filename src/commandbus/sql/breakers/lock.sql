-- Locks one breaker for who is about to move it; no row if there is none (or, with SKIP LOCKED, somebody else is at it).
-- Locks: the row. Index: breaker_pkey.
SELECT state, recent, is_forced, opened_at, until, reason, probe, probe_until, vain, reset, pg_catalog.clock_timestamp()
  FROM commandbus.breaker
 WHERE domain = %(domain)s AND command_type = %(type)s
   FOR NO KEY UPDATE {locking}
