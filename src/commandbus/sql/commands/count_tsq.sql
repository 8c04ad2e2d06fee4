-- How many commands need a person, by domain and type: of each type it looks at so many at most (null: at all), and says how many
-- it looked at. It finds the types one after the other, at most %(types)s.
-- Locks: none. Index: tsq_domain_type, whose columns are compared as a row, which only this index offers.
WITH RECURSIVE kind AS (
    SELECT first.domain, first.command_type, 1 AS n
      FROM (SELECT t.domain, t.command_type FROM commandbus.tsq t
             WHERE (t.domain, t.command_type, t.command) > (COALESCE(%(domain)s::text, ''), COALESCE(%(first)s::text, ''), 0)
             ORDER BY t.domain, t.command_type, t.command LIMIT 1) first
    UNION ALL
    SELECT next.domain, next.command_type, k.n + 1
      FROM kind k
     CROSS JOIN LATERAL (
           SELECT t.domain, t.command_type FROM commandbus.tsq t
            WHERE (t.domain, t.command_type, t.command) > (k.domain, k.command_type, 9223372036854775807)
            ORDER BY t.domain, t.command_type, t.command LIMIT 1) next
     WHERE k.n < %(types)s AND (%(domain)s::text IS NULL OR k.domain = %(domain)s)
)
SELECT k.domain, k.command_type, counted.matching, counted.looked_at
  FROM kind k
 CROSS JOIN LATERAL (
       SELECT pg_catalog.count(*) AS looked_at,
              pg_catalog.count(*) FILTER (
                  WHERE (%(error_code)s::text IS NULL OR x.error_code = %(error_code)s)
                    AND (%(fingerprint)s::text IS NULL OR x.fingerprint = %(fingerprint)s)) AS matching
         FROM (SELECT t.error_code, t.fingerprint FROM commandbus.tsq t
                WHERE (t.domain, t.command_type, t.command) > (k.domain, k.command_type, 0)
                  AND (t.domain, t.command_type, t.command) <= (k.domain, k.command_type, 9223372036854775807)
                ORDER BY t.domain, t.command_type, t.command
                LIMIT %(most)s) x) counted
 WHERE (%(domain)s::text IS NULL OR k.domain = %(domain)s)
   AND (%(command_type)s::text IS NULL OR k.command_type = %(command_type)s)
   AND counted.matching > 0
 ORDER BY k.domain, k.command_type
