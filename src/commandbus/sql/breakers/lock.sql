-- Locks one breaker that the caller wants to move. Returns no row if there is none or, with SKIP LOCKED, if another
-- transaction has locked it. Locks: the row. Index: breaker_pkey.
SELECT state, recent, is_forced, opened_at, until, reason, probe, probe_until, vain, reset, pg_catalog.clock_timestamp()
  FROM commandbus.breaker
 WHERE domain = %(domain)s AND command_type = %(type)s
   FOR NO KEY UPDATE {locking}
