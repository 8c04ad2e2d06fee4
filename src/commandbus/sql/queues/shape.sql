-- Does this PGMQ queue exist, and does it have the column of newer versions of PGMQ? Locks: none. Catalogs only.
SELECT t.queue IS NOT NULL,
       EXISTS (SELECT FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = t.queue::oid AND a.attname = 'last_read_at'::pg_catalog.name AND NOT a.attisdropped)
  FROM pg_catalog.to_regclass(%(table)s::text) AS t (queue)
