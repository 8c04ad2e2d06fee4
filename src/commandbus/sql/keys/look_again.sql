-- Marks the first waiting command of each key of a limit, or of one key, as new, so that a worker looks at its key again.
-- Locks: these rows. Somebody releases those that are locked. Index: keyed_line, from one key to the next.
WITH RECURSIVE head AS (
    (SELECT key, command FROM commandbus.keyed
      WHERE domain = %(domain)s AND key_limit = %(name)s AND state IN ('NEW', 'WAITING')
        AND (%(key)s::text IS NULL OR key = %(key)s)
      ORDER BY key, command LIMIT 1)
    UNION ALL
    SELECT n.key, n.command
      FROM head h
     CROSS JOIN LATERAL (
           SELECT k.key, k.command FROM commandbus.keyed k
            WHERE k.domain = %(domain)s AND k.key_limit = %(name)s AND k.state IN ('NEW', 'WAITING') AND k.key > h.key
            ORDER BY k.key, k.command LIMIT 1) n
     WHERE %(key)s::text IS NULL
), marked AS (
    UPDATE commandbus.keyed SET state = 'NEW'
     WHERE command = ANY (ARRAY(SELECT k.command FROM commandbus.keyed k
                                 WHERE k.command = ANY (ARRAY(SELECT command FROM head))
                                   AND CASE WHEN k.state = 'WAITING' THEN true ELSE false END
                                   FOR UPDATE SKIP LOCKED))
)
SELECT pg_catalog.pg_notify(%(channel)s, %(domain)s)
