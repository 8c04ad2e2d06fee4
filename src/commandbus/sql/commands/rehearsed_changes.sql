-- The rows that the present transaction has written, by table, also in savepoints that were rolled back. Locks: none. Index: none;
-- the server counts them in memory.
SELECT pg_catalog.concat(schemaname, '.', relname) AS commandbus_rehearsal, n_tup_ins, n_tup_upd, n_tup_del
  FROM pg_catalog.pg_stat_xact_user_tables
 WHERE n_tup_ins + n_tup_upd + n_tup_del > 0 AND schemaname::text !~ '^pg_temp'::text
 ORDER BY 1
