-- The keys of one key limit that have unfinished commands, those with the most waiting first. Counts all of them: for people.
-- Locks: none. Indexes: keyed_line, keyed_released.
WITH line AS (
    SELECT k.key, pg_catalog.count(*) FILTER (WHERE k.state = 'RELEASED') AS released,
           pg_catalog.count(*) FILTER (WHERE k.state IN ('NEW', 'WAITING')) AS waiting
      FROM commandbus.keyed k
     WHERE k.domain = %(domain)s AND k.key_limit = %(name)s AND k.state <> 'ASIDE'
       AND (%(keys)s::text[] IS NULL OR k.key = ANY (%(keys)s::text[]))
     GROUP BY k.key
     ORDER BY waiting DESC, k.key
     LIMIT %(limit)s
)
SELECT l.domain, l.name, line.key, COALESCE(o.concurrency, l.concurrency), line.released, line.waiting,
       (SELECT c.command_id FROM commandbus.keyed k JOIN commandbus.command c ON c.id = k.command
         WHERE k.domain = l.domain AND k.key_limit = l.name AND k.key = line.key AND k.state = 'RELEASED'
           AND c.status OPERATOR(pg_catalog.=) 'IN_TROUBLESHOOTING_QUEUE' ORDER BY k.command LIMIT 1),
       o.until
  FROM line
  JOIN commandbus.key_limit l ON l.domain = %(domain)s AND l.name = %(name)s
  LEFT JOIN commandbus.key_override o
    ON o.domain = l.domain AND o.key_limit = l.name AND o.key = line.key AND o.until > pg_catalog.now()
 ORDER BY line.waiting DESC, line.key
