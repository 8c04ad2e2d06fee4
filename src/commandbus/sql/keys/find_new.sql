-- Keys of one domain whose lines somebody has joined since the last look, from one key to the next, with the new commands.
-- Locks: none. Index: keyed_new. One key with very many new commands is one key here, and does not hold up the others.
WITH RECURSIVE found AS (
    (SELECT key_limit, key, 1 AS n FROM commandbus.keyed
      WHERE domain = %(domain)s AND state = 'NEW' AND (key_limit, key) > (%(after_limit)s::text, %(after_key)s::text)
      ORDER BY key_limit, key LIMIT 1)
    UNION ALL
    SELECT x.key_limit, x.key, f.n + 1
      FROM found f
     CROSS JOIN LATERAL (
           SELECT k.key_limit, k.key FROM commandbus.keyed k
            WHERE k.domain = %(domain)s AND k.state = 'NEW' AND (k.key_limit, k.key) > (f.key_limit, f.key)
            ORDER BY k.key_limit, k.key LIMIT 1) x
     WHERE f.n < %(bite)s
)
SELECT f.key_limit, f.key,
       ARRAY(SELECT k.command FROM commandbus.keyed k
              WHERE k.domain = %(domain)s AND k.key_limit = f.key_limit AND k.key = f.key AND k.state = 'NEW'
              ORDER BY k.command LIMIT %(each)s)
  FROM found f
 ORDER BY f.key_limit, f.key
