-- Notes what a portion of a plan did, and when the next one is due; DONE if it was the last.
-- Locks: the plan's row, held by the caller. Index: the key.
UPDATE commandbus.plan
   SET reached = %(reached)s, moved = moved + %(moved)s::integer, skipped = skipped + pg_catalog.cardinality(%(skipped)s::bigint[]),
       next_at = CASE WHEN seconds = 0::float8 THEN pg_catalog.clock_timestamp()
                      ELSE greatest(next_at, pg_catalog.clock_timestamp() - interval '1 second')
                           + pg_catalog.make_interval(secs => seconds * %(seen)s::float8 / total::float8) END,
       state = CASE WHEN moved + skipped + %(seen)s::integer >= total THEN 'DONE' ELSE state END,
       finished_at = CASE WHEN moved + skipped + %(seen)s::integer >= total THEN pg_catalog.clock_timestamp() END
 WHERE id = %(plan)s
RETURNING state
