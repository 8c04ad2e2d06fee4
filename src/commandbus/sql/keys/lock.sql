-- Locks some keys of a domain until the transaction ends, those that nobody else has locked, and returns them. The session that has
-- locked a key is the only one that releases its commands. The next statement sees all that earlier holders of the lock have done.
-- Locks: advisory ones, of 2,048 in all, so that they never fill the server's table of locks. Keys that share one wait a moment
-- for each other, which does no harm.
SELECT x.key_limit, x.key
  FROM ROWS FROM (pg_catalog.unnest(%(limits)s::text[]), pg_catalog.unnest(%(keys)s::text[])) AS x(key_limit, key)
 WHERE pg_catalog.pg_try_advisory_xact_lock(
           pg_catalog.hashtext('commandbus key'),
           pg_catalog.hashtext(pg_catalog.concat_ws(' ', %(domain)s::text, x.key_limit, x.key)) & 2047)
