-- Writes the state of a limit after an answer of its API, and frees permits. An answer never changes what a person has
-- decided (breaker_forced), and a role that only calls has no right to. Locks: the row (the caller has locked it). Index:
-- limits_pkey.
UPDATE commandbus.limits
   SET holders = holders - %(gone)s::text[], rate_limited = rate_limited + %(counts)s, step = %(step)s,
       until = pg_catalog.to_timestamp(%(until)s::float8), reason = %(reason)s, failures = %(failures)s,
       breaker_open = %(breaker_open)s,
       opened_at = pg_catalog.to_timestamp(%(opened_at)s::float8),
       open_until = pg_catalog.to_timestamp(%(open_until)s::float8), open_reason = %(open_reason)s,
       probe = %(probe)s,
       probe_until = pg_catalog.to_timestamp(%(probe_until)s::float8),
       blamed = %(blamed)s::text[], vain = %(vain)s::jsonb,
       good_at = CASE WHEN %(good)s THEN pg_catalog.clock_timestamp() ELSE good_at END
 WHERE name = %(name)s
