-- The places in line of some commands that wait for their turn: how many are before each (counted up to `most`), and the places of
-- its key.
-- Locks: none. Indexes: the key of keyed, keyed_line; those of commandbus.key_places.
SELECT k.command, k.key_limit, k.key, b.before, p.concurrency, p.released, p.blocked_by, p.next_seconds, p.run_seconds
  FROM (SELECT command, domain, key_limit, key, state FROM commandbus.keyed
         WHERE command = ANY (%(commands)s::bigint[]) OFFSET 0) k  -- without the state, which would offer keyed_line
 CROSS JOIN LATERAL (
       SELECT pg_catalog.count(*) AS before FROM (
              SELECT FROM commandbus.keyed o
               WHERE o.domain = k.domain AND o.key_limit = k.key_limit AND o.key = k.key AND o.state IN ('NEW', 'WAITING')
                 AND o.command < k.command LIMIT %(most)s) counted) b
 CROSS JOIN LATERAL commandbus.key_places(k.domain, k.key_limit, k.key) p
 WHERE k.state IN ('NEW', 'WAITING')
