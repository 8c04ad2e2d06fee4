-- The server in a line: its version, how many connections it allows and has, when it forces a vacuum against wraparound, and where
-- pg_stat_statements is installed (null: nowhere).
-- Locks: none.
SELECT pg_catalog.current_setting('server_version'), pg_catalog.current_setting('max_connections')::integer,
       (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity a
         WHERE a.backend_type = 'client backend' OR (a.backend_type IS NULL AND a.usename IS NOT NULL)),
       pg_catalog.current_setting('autovacuum_freeze_max_age')::bigint, pg_catalog.current_setting('autovacuum')::boolean,
       (SELECT n.nspname::text FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace
         WHERE e.extname = 'pg_stat_statements'), pg_catalog.pg_database_size(pg_catalog.current_database())
