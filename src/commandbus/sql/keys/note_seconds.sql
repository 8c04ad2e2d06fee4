-- Notes for how long commands of a key limit have kept their places of late. It does not wait for a lock.
-- Locks: the row of the key limit. Index: key_limit_pkey.
WITH free AS MATERIALIZED (
    SELECT domain, name FROM commandbus.key_limit WHERE domain = %(domain)s AND name = %(name)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE commandbus.key_limit l
   SET run_seconds = COALESCE(l.run_seconds::float8 * 0.7::float8 + %(seconds)s::float8 * 0.3::float8, %(seconds)s::float8)
  FROM free f
 WHERE l.domain = f.domain AND l.name = f.name
