-- The versions of code that workers run or ran: since when, and whether a live worker runs it. Rows of workers are removed a day or more
-- after their end. Locks: none. There are few workers: no index.
SELECT code_version, pg_catalog.min(started_at),
       pg_catalog.bool_or(state <> 'STOPPED' AND heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s))
  FROM commandbus.worker
 WHERE code_version IS NOT NULL
 GROUP BY code_version
 ORDER BY 2 DESC
 LIMIT 100
