-- The keys of one key limit that have unfinished commands, those with the most waiting first; or these keys. It looks at the first
-- `keys_most` keys, and counts at most `most` commands of a key.
-- Locks: none. Indexes: keyed_line and keyed_released, from one key to the next; those of commandbus.key_places.
WITH RECURSIVE found AS (
    SELECT (SELECT pg_catalog.min(key) FROM commandbus.keyed
             WHERE domain = %(domain)s AND key_limit = %(name)s AND state IN ('NEW', 'WAITING')) AS waiting,
           (SELECT pg_catalog.min(key) FROM commandbus.keyed
             WHERE domain = %(domain)s AND key_limit = %(name)s AND state = 'RELEASED') AS released, 1 AS n
     WHERE %(keys)s::text[] IS NULL
    UNION ALL
    SELECT CASE WHEN f.waiting <= COALESCE(f.released, f.waiting)
                THEN (SELECT pg_catalog.min(k.key) FROM commandbus.keyed k
                       WHERE k.domain = %(domain)s AND k.key_limit = %(name)s AND k.state IN ('NEW', 'WAITING')
                         AND k.key > f.waiting) ELSE f.waiting END,
           CASE WHEN f.released <= COALESCE(f.waiting, f.released)
                THEN (SELECT pg_catalog.min(k.key) FROM commandbus.keyed k
                       WHERE k.domain = %(domain)s AND k.key_limit = %(name)s AND k.state = 'RELEASED'
                         AND k.key > f.released) ELSE f.released END,
           f.n + 1
      FROM found f
     WHERE (f.waiting IS NOT NULL OR f.released IS NOT NULL) AND f.n < %(keys_most)s
), key AS (
    SELECT least(waiting, released) AS key FROM found WHERE waiting IS NOT NULL OR released IS NOT NULL
    UNION
    SELECT pg_catalog.unnest(%(keys)s::text[])
), line AS MATERIALIZED (
    SELECT key.key, (SELECT pg_catalog.count(*) FROM (
                     SELECT FROM commandbus.keyed k
                      WHERE k.domain = %(domain)s AND k.key_limit = %(name)s AND k.key = key.key
                        AND k.state IN ('NEW', 'WAITING') LIMIT %(most)s) counted) AS waiting
      FROM key
     ORDER BY 2 DESC, 1
     LIMIT %(limit)s
)
SELECT l.domain, l.name, line.key, p.concurrency, p.released, line.waiting, p.blocked_by, p.override_ends_at,
       CASE WHEN line.waiting > 0 THEN p.next_seconds END
  FROM line
  JOIN commandbus.key_limit l ON l.domain = %(domain)s AND l.name = %(name)s
 CROSS JOIN LATERAL commandbus.key_places(l.domain, l.name, line.key) p
 WHERE line.waiting > 0 OR p.released > 0
 ORDER BY line.waiting DESC, line.key
