-- Writes how a breaker stands. Locks: the row (the caller has locked it). Index: breaker_pkey.
UPDATE commandbus.breaker
   SET state = %(state)s, stuck_at = %(stuck_at)s, failed_at = %(failed_at)s, is_forced = %(is_forced)s,
       opened_at = %(opened_at)s, until = %(until)s, reason = %(reason)s, probe = %(probe)s, probe_until = %(probe_until)s
 WHERE domain = %(domain)s AND command_type = %(type)s
