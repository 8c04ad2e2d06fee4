-- Records that a worker is alive, what it does, and which command types it has handlers for. Types that are stored
-- already are not written again. Returns for how many seconds somebody watches the slots of workers (0 or less: nobody), and
-- whether somebody has asked this worker something. Locks: its own row. Indexes: the keys; worker_request_open.
INSERT INTO commandbus.worker AS w (id, host, pid, domains, concurrency, version, code_version, supervisor, state, running, settled, rates,
                                    health, counts, types)
VALUES (%(id)s, %(host)s, %(pid)s, %(domains)s::text[], %(concurrency)s, %(version)s, %(code_version)s, %(supervisor)s, %(state)s,
        %(running)s, %(settled)s, %(rates)s::json, %(health)s::json, %(counts)s::jsonb, %(types)s::text[])
ON CONFLICT (id) DO UPDATE
   SET heartbeat_at = pg_catalog.now(), state = excluded.state, running = excluded.running,
       settled = excluded.settled,
       rates = excluded.rates, health = excluded.health, counts = excluded.counts,
       types = CASE WHEN w.types OPERATOR(pg_catalog.=) excluded.types THEN w.types ELSE excluded.types END
RETURNING COALESCE((SELECT extract(epoch FROM a.until - pg_catalog.now())::float8 FROM commandbus.watch a
                     WHERE a.what = 'slots'), 0),
          EXISTS (SELECT FROM commandbus.worker_request r WHERE r.worker = w.id AND r.answered_at IS NULL)
