-- Tables of commandbus and its queues: rows, dead rows, and when they were last vacuumed and analyzed; those with most dead rows first.
-- Locks: none. Reads the server's statistics.
SELECT s.schemaname::text || '.' || s.relname::text, s.n_live_tup, s.n_dead_tup,
       pg_catalog.pg_total_relation_size(s.relid), greatest(s.last_vacuum, s.last_autovacuum),
       greatest(s.last_analyze, s.last_autoanalyze), pg_catalog.age(c.relfrozenxid)
  FROM pg_catalog.pg_stat_all_tables s
  JOIN pg_catalog.pg_class c ON c.oid = s.relid
 WHERE s.schemaname IN ('commandbus', 'pgmq') AND c.relkind = 'r'
 ORDER BY s.n_dead_tup DESC, s.n_live_tup DESC, 1
 LIMIT %(most)s
