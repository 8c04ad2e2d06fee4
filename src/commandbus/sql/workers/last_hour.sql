-- The figures of the last minutes; at least one row, with the database's time. Locks: none. Index: the key of minute_figure,
-- whose rows are removed after two hours.
SELECT pg_catalog.now(), f.at, f.domain, f.settled, f.ready, f.waits
  FROM (VALUES (1)) AS one (n)
  LEFT JOIN commandbus.minute_figure f
    ON f.at > pg_catalog.now() - interval '62 minutes'
   AND (%(domains)s::text[] IS NULL OR f.domain = ANY (%(domains)s::text[]))
