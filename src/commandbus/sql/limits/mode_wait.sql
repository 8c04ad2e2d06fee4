-- Says for how many seconds more only those who hold a permit may go on, and because of whom. Only for who has locked the
-- row. Locks: that row. Index: limit_mode_pkey.
UPDATE commandbus.limit_mode
   SET until = LEAST(until, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(seconds)s::float8)),
       note = %(note)s
 WHERE id = 1
