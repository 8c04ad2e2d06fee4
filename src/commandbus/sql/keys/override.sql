-- Gives one key another concurrency for some time. Returns nothing if there is no such key limit.
-- Overrides of this limit that are over are removed.
-- Locks: their rows. Index: key_override_pkey.
WITH over AS (
    DELETE FROM commandbus.key_override
     WHERE domain = %(domain)s AND key_limit = %(name)s AND key <> %(key)s AND until <= pg_catalog.now()
)
INSERT INTO commandbus.key_override (domain, key_limit, key, concurrency, until)
SELECT domain, name, %(key)s, %(concurrency)s, pg_catalog.now() + pg_catalog.make_interval(secs => %(seconds)s)
  FROM commandbus.key_limit WHERE domain = %(domain)s AND name = %(name)s
ON CONFLICT (domain, key_limit, key) DO UPDATE SET concurrency = excluded.concurrency, until = excluded.until
RETURNING key
