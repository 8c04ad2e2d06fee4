-- Notes what a portion of a plan did, and when the next one is due; DONE if it was the last. A plan that only has commands left that
-- others have locked looks again after a second.
-- Locks: the plan's row, held by the caller. Index: the key.
UPDATE commandbus.plan
   SET reached = %(reached)s, moved = moved + %(moved)s::integer, skipped = skipped + %(skipped)s::integer,
       locked = locked + %(locked)s::integer,
       next_at = CASE WHEN %(seen)s::integer = 0 THEN pg_catalog.clock_timestamp() + interval '1 second'
                      WHEN seconds = 0::float8 THEN pg_catalog.clock_timestamp()
                      ELSE greatest(next_at, pg_catalog.clock_timestamp() - interval '1 second')
                           + pg_catalog.make_interval(secs => seconds * %(seen)s::float8 / total::float8) END,
       state = CASE WHEN moved + skipped + %(moved)s::integer + %(skipped)s::integer >= total THEN 'DONE' ELSE state END,
       finished_at = CASE WHEN moved + skipped + %(moved)s::integer + %(skipped)s::integer >= total
                          THEN pg_catalog.clock_timestamp() END
 WHERE id = %(plan)s
RETURNING state
