-- The command types of a domain that have commands in the troubleshooting queue, at most so many.
-- Locks: none. Index: tsq_domain_type, one entry for each type.
WITH RECURSIVE kind AS (
    SELECT * FROM (SELECT t.domain, t.command_type, 1 AS n FROM commandbus.tsq t
                    WHERE (t.domain, t.command_type, t.command) > (%(domain)s, '', 0)
                    ORDER BY t.domain, t.command_type, t.command LIMIT 1) first
    UNION ALL
    SELECT next.domain, next.command_type, k.n + 1
      FROM kind k
     CROSS JOIN LATERAL (
           SELECT t.domain, t.command_type FROM commandbus.tsq t
            WHERE (t.domain, t.command_type, t.command) > (k.domain, k.command_type, 9223372036854775807)
            ORDER BY t.domain, t.command_type, t.command LIMIT 1) next
     WHERE k.domain = %(domain)s AND k.n < %(most)s
)
SELECT k.command_type FROM kind k WHERE k.domain = %(domain)s
