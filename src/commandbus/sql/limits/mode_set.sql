-- Changes where the permits of Redis limits are kept, and notifies the limit clients. The caller must have locked the
-- row.
-- Locks: that row. Index: limit_mode_pkey.
WITH changed AS (
    UPDATE commandbus.limit_mode
       SET mode = %(mode)s, epoch = %(epoch)s, since = pg_catalog.clock_timestamp(),
           until = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(seconds)s::float8), note = %(note)s
     WHERE id = 1
)
SELECT pg_catalog.pg_notify(%(channel)s, %(text)s)
