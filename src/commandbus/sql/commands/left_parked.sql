-- The command types of some domains with commands that are still parked although their pause is over, or their breaker is
-- closed.
-- Locks: none. Index: parked_reason, from one type to the next.
WITH RECURSIVE kind AS (
    (SELECT reason, domain, command_type FROM commandbus.parked ORDER BY reason, domain, command_type LIMIT 1)
    UNION ALL
    SELECT n.reason, n.domain, n.command_type
      FROM kind k
     CROSS JOIN LATERAL (
           SELECT p.reason, p.domain, p.command_type
             FROM commandbus.parked p
            WHERE (p.reason, p.domain, p.command_type) > (k.reason, k.domain, k.command_type)
            ORDER BY p.reason, p.domain, p.command_type
            LIMIT 1) n
)
SELECT k.reason, k.domain, k.command_type
  FROM kind k
 WHERE k.domain = ANY (%(domains)s)
   AND CASE k.reason
       WHEN 'pause' THEN NOT EXISTS (SELECT FROM commandbus.pause s
                                      WHERE s.domain = k.domain AND s.command_type = k.command_type)
       WHEN 'breaker' THEN NOT EXISTS (SELECT FROM commandbus.breaker b
                                        WHERE b.domain = k.domain AND b.command_type = k.command_type
                                          AND b.state <> 'CLOSED')
       ELSE false END
