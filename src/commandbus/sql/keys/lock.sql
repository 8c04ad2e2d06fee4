-- Locks some keys of a domain until the transaction ends, those that nobody else has locked, and returns them. Who has locked
-- a key is the only one who releases its commands. The next statement sees all that earlier holders of the lock have done.
-- Locks: an advisory lock per key. Two keys may share one, which does no harm.
SELECT x.key_limit, x.key
  FROM ROWS FROM (pg_catalog.unnest(%(limits)s::text[]), pg_catalog.unnest(%(keys)s::text[])) AS x(key_limit, key)
 WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(
           pg_catalog.concat_ws(' ', 'commandbus key', %(domain)s::text, x.key_limit, x.key), 0::bigint))
