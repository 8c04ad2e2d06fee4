-- Looks at a bite of commands in the lines of keys. Returns the last one if there may be more, and the keys that a worker must
-- look at: with commands that wait while none is released, because an override is over or something went wrong.
-- Locks: none. Indexes: the keys of keyed and command, keyed_released.
WITH bite AS MATERIALIZED (
    SELECT command, domain, key_limit, key, state FROM commandbus.keyed
     WHERE command > %(after)s ORDER BY command LIMIT %(bite)s
)
SELECT (SELECT pg_catalog.max(command) FROM bite HAVING pg_catalog.count(*) = %(bite)s), NULL, NULL, NULL
UNION ALL
SELECT DISTINCT NULL::bigint, b.domain, b.key_limit, b.key
  FROM bite b
  LEFT JOIN LATERAL (SELECT status FROM commandbus.command WHERE id = b.command OFFSET 0) c ON true
 WHERE b.domain = ANY (%(domains)s::text[])
   AND CASE WHEN c.status IS NULL THEN true
            WHEN b.state = 'WAITING' THEN
                 NOT EXISTS (SELECT FROM commandbus.keyed k
                              WHERE k.domain = b.domain AND k.key_limit = b.key_limit AND k.key = b.key AND k.state = 'RELEASED')
            ELSE false END
