-- Our statements that took most time in all, since the statistics were last reset.
-- Locks: none. Reads pg_stat_statements, which has as many rows as pg_stat_statements.max allows.
SELECT pg_catalog.left(s.query, 8000), s.calls, s.total_exec_time / 1000, s.mean_exec_time, s.max_exec_time, s.rows
  FROM {schema}.pg_stat_statements s
  JOIN pg_catalog.pg_database d ON d.oid = s.dbid AND d.datname = pg_catalog.current_database()
 WHERE s.query LIKE '%%commandbus.%%' OR s.query LIKE '%%pgmq.%%'
 ORDER BY s.total_exec_time DESC
 LIMIT %(most)s
