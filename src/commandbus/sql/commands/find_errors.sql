-- A bite of attempts, the newest commands first, and whether their error contains a text.
-- Locks: none. Index: attempt's key, backwards.
SELECT a.command, COALESCE(pg_catalog.strpos(pg_catalog.lower(COALESCE(a.error_type, '') || ' ' || COALESCE(a.error_code, '') || ' '
                                                              || COALESCE(a.error, '')), %(error)s) > 0, false)
  FROM commandbus.attempt a
 WHERE a.command < %(before_id)s::bigint
 ORDER BY a.command DESC
 LIMIT %(bite)s
