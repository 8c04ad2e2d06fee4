-- Ends a plan before its last command. What it has done stays. Locks: the plan's row, held by the caller. Index: the key.
UPDATE commandbus.plan
   SET state = 'STOPPED', locked = 0, stopped_by = %(operator)s, note = %(note)s, finished_at = pg_catalog.clock_timestamp()
 WHERE id = %(plan)s AND state IN ('PREVIEWED', 'RUNNING')
