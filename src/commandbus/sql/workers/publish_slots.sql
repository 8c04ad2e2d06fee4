-- Shows what a worker's slots run now. Returns for how many more seconds somebody watches.
-- Locks: its own row. Indexes: the keys.
INSERT INTO commandbus.worker_slots AS s (worker, domains, state)
VALUES (%(worker)s, %(domains)s::text[], %(state)s::json)
ON CONFLICT (worker) DO UPDATE SET taken_at = pg_catalog.now(), domains = excluded.domains, state = excluded.state
RETURNING COALESCE((SELECT extract(epoch FROM w.until - pg_catalog.now())::float8 FROM commandbus.watch w
                     WHERE w.what = 'slots'), 0)
