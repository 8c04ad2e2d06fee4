-- The last back-offs of a limit, newest first, at most so many. Locks: none. Index: limit_backoff_limit, backwards.
SELECT at, answer, step, seconds, breaker_open, reason
  FROM commandbus.limit_backoff
 WHERE limit_name = %(name)s
 ORDER BY id DESC
 LIMIT %(most)s
