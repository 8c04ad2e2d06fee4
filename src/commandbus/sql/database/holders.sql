-- Who holds back vacuum, or has a transaction open, the oldest first: sessions, prepared transactions, and replication slots. `xid_age`
-- is how many transactions ago the oldest row version is that it may still see.
-- Locks: none. What sessions of other roles do, and since when, is hidden, unless the role is a member of pg_read_all_stats. What they
-- hold back is not.
SELECT held.kind, held.name, held.role, held.application, held.client, held.state, held.seconds, held.xid_age, held.waits_for,
       held.blocked_by, held.query
  FROM (SELECT 'session' AS kind, a.pid::text AS name, a.usename::text AS role, a.application_name AS application,
               pg_catalog.host(a.client_addr) AS client, a.state,
               extract(epoch FROM pg_catalog.now() - a.xact_start)::float8 AS seconds,
               pg_catalog.age(COALESCE(a.backend_xmin, a.backend_xid))::bigint AS xid_age,
               CASE WHEN a.wait_event IS NOT NULL AND a.state = 'active' THEN a.wait_event_type || ': ' || a.wait_event END AS waits_for,
               CASE WHEN a.wait_event_type = 'Lock' THEN pg_catalog.pg_blocking_pids(a.pid) END AS blocked_by,
               pg_catalog.left(a.query, 1000) AS query
          FROM pg_catalog.pg_stat_activity a
         WHERE (a.xact_start IS NOT NULL OR a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
           AND a.datname = pg_catalog.current_database() AND a.pid <> pg_catalog.pg_backend_pid()
        UNION ALL
        SELECT 'prepared transaction', p.gid, p.owner::text, NULL, NULL, NULL,
               extract(epoch FROM pg_catalog.now() - p.prepared)::float8, pg_catalog.age(p.transaction)::bigint, NULL, NULL, NULL
          FROM pg_catalog.pg_prepared_xacts p
         WHERE p.database = pg_catalog.current_database()
        UNION ALL
        SELECT 'replication slot', r.slot_name::text, NULL, NULL, NULL, CASE WHEN r.active THEN 'active' ELSE 'inactive' END,
               NULL, pg_catalog.age(COALESCE(r.xmin, r.catalog_xmin))::bigint, NULL, NULL, NULL
          FROM pg_catalog.pg_replication_slots r
         WHERE r.xmin IS NOT NULL OR r.catalog_xmin IS NOT NULL) held
 ORDER BY held.seconds DESC NULLS LAST, held.xid_age DESC NULLS LAST
 LIMIT %(most)s
