-- Records which schedules a worker's code declares. A declaration that was seen within the last seconds is not written
-- again.
--
-- Locks: rows that it inserts or changes, in the order of their keys. Index: schedule_declaration_pkey.
INSERT INTO commandbus.schedule_declaration AS d (domain, name, fingerprint, definition)
SELECT x.domain, x.name, x.fingerprint, x.definition
  FROM pg_catalog.json_to_recordset(%(rows)s::json) AS x(domain text, name text, fingerprint text, definition json)
 ORDER BY x.domain, x.name, x.fingerprint
ON CONFLICT (domain, name, fingerprint) DO UPDATE
   SET seen_at = pg_catalog.now()
 WHERE d.seen_at < pg_catalog.now() - interval '4 seconds'
