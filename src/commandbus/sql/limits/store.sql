-- Writes what a limit allows; its state stays. Locks: the limit's row. Index: limits_pkey.
INSERT INTO commandbus.limits (name, environment, store, concurrency, per_second, burst, lease, max_wait, tries, backoff,
                               breaker_failures, breaker_reset, declared, override)
VALUES (%(name)s, %(environment)s, %(store)s, %(concurrency)s, %(per_second)s, %(burst)s, %(lease)s, %(max_wait)s,
        %(tries)s, %(backoff)s, %(breaker_failures)s, %(breaker_reset)s, %(declared)s::json, %(override)s::json)
ON CONFLICT (name) DO UPDATE
   SET environment = excluded.environment, store = excluded.store, concurrency = excluded.concurrency,
       per_second = excluded.per_second, burst = excluded.burst, lease = excluded.lease, max_wait = excluded.max_wait,
       tries = excluded.tries, backoff = excluded.backoff, breaker_failures = excluded.breaker_failures,
       breaker_reset = excluded.breaker_reset, declared = excluded.declared, override = excluded.override,
       changed_at = pg_catalog.now()
