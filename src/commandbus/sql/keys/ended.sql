-- Looks at a bite of released commands of one domain, from a key on. Returns the last key if there may be more, and the keys that a
-- worker must look at, because a command has ended or may step aside: its worker has vanished, or a person has ended it.
-- Locks: none. Indexes: keyed_released, the key of command.
WITH bite AS MATERIALIZED (
    SELECT command, key_limit, key FROM commandbus.keyed
     WHERE domain = %(domain)s AND state = 'RELEASED'
       AND (key_limit, key, command) > (%(after_limit)s::text, %(after_key)s::text, %(after)s::bigint)
     ORDER BY key_limit, key, command LIMIT %(bite)s
)
SELECT key_limit, key, command, true FROM (SELECT * FROM bite ORDER BY key_limit DESC, key DESC, command DESC LIMIT 1) last
 WHERE (SELECT pg_catalog.count(*) FROM bite) = %(bite)s
UNION ALL
SELECT DISTINCT b.key_limit, b.key, 0::bigint, false
  FROM bite b
  LEFT JOIN LATERAL (SELECT status FROM commandbus.command WHERE id = b.command OFFSET 0) c ON true
 WHERE c.status IS NULL
    OR (c.status OPERATOR(pg_catalog.<>) 'PENDING'
        AND (c.status OPERATOR(pg_catalog.<>) 'IN_TROUBLESHOOTING_QUEUE' OR EXISTS (
             SELECT FROM commandbus.key_limit l WHERE l.domain = %(domain)s AND l.name = b.key_limit AND l.steps_aside)))
