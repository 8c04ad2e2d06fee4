-- Writes the state of a breaker. Locks: the row (the caller has locked it). Index: breaker_pkey.
UPDATE commandbus.breaker
   SET state = %(state)s, recent = %(recent)s::jsonb,
       counted_until = pg_catalog.to_timestamp(%(last)s::float8 + window_seconds), is_forced = %(is_forced)s,
       opened_at = %(opened_at)s, until = %(until)s, reason = %(reason)s, probe = %(probe)s,
       probe_until = %(probe_until)s, vain = %(vain)s::bigint[]
 WHERE domain = %(domain)s AND command_type = %(type)s
