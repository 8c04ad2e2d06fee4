-- A worker says that it lives, and what it does. Locks: its own row.
INSERT INTO commandbus.worker (id, host, pid, domains, concurrency, version, supervisor, state, running, settled, rates,
                               health, counts)
VALUES (%(id)s, %(host)s, %(pid)s, %(domains)s::text[], %(concurrency)s, %(version)s, %(supervisor)s, %(state)s,
        %(running)s, %(settled)s, %(rates)s::json, %(health)s::json, %(counts)s::jsonb)
ON CONFLICT (id) DO UPDATE
   SET heartbeat_at = pg_catalog.now(), state = excluded.state, running = excluded.running,
       settled = excluded.settled,
       rates = excluded.rates, health = excluded.health, counts = excluded.counts
