-- Notes that a bad answer of a limit's API blocks the limit: one row. Of each limit the last 500 are kept.
-- Locks: rows of limit_backoff that are deleted; the caller has locked the limit's row, so nobody else deletes them.
-- Index: limit_backoff_limit.
WITH forgotten AS (
    DELETE FROM commandbus.limit_backoff
     WHERE limit_name = %(name)s
       AND id <= (SELECT b.id FROM commandbus.limit_backoff b WHERE b.limit_name = %(name)s
                   ORDER BY b.id DESC OFFSET 499 LIMIT 1)
)
INSERT INTO commandbus.limit_backoff (limit_name, answer, step, seconds, breaker_open, reason)
VALUES (%(name)s, %(answer)s, %(step)s, %(seconds)s, %(breaker_open)s, %(reason)s)
