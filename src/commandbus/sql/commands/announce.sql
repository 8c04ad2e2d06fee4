-- An idle worker asks for notifications on its domains until they expire. Locks: its own rows.
INSERT INTO commandbus.waiting (domain, worker, expires_at)
SELECT domain, %(worker)s, pg_catalog.now() + pg_catalog.make_interval(secs => %(seconds)s)
  FROM pg_catalog.unnest(%(domains)s::text[]) AS domain
ON CONFLICT (domain, worker) DO UPDATE SET expires_at = excluded.expires_at
