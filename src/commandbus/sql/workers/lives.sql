-- From when to when workers were there within the last hour, and with which version of the code; the youngest first. Locks: none.
-- Reads the registry, which has a row for each worker process of the last day.
SELECT domains, COALESCE(code_version, version), started_at,
       CASE WHEN state <> 'STOPPED' AND heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s)
            THEN pg_catalog.now() ELSE heartbeat_at END
  FROM commandbus.worker
 WHERE heartbeat_at > pg_catalog.now() - interval '62 minutes'
 ORDER BY started_at DESC
 LIMIT %(most)s
