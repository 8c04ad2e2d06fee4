-- Locks one breaker that the caller wants to move, and makes it if there is none. Overwrites its options.
-- Locks: the row. Index: breaker_pkey.
INSERT INTO commandbus.breaker AS b (domain, command_type, window_seconds, reset, refuses)
VALUES (%(domain)s, %(type)s, %(window)s, %(reset)s, %(refuses)s)
ON CONFLICT (domain, command_type) DO UPDATE
   SET window_seconds = excluded.window_seconds, reset = excluded.reset, refuses = excluded.refuses
RETURNING b.state, b.recent, b.is_forced, b.opened_at, b.until, b.reason, b.probe, b.probe_until, b.vain, b.reset,
          pg_catalog.clock_timestamp()
