-- Says for how many more seconds no new call may begin, and which program causes that. The caller must have locked the
-- row. Locks: that row. Index: limit_mode_pkey.
UPDATE commandbus.limit_mode
   SET until = LEAST(until, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(seconds)s::float8)),
       note = %(note)s
 WHERE id = 1
