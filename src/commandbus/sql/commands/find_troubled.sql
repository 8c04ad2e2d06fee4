-- A bite of the commands in the troubleshooting queue, newest first, by the caller's condition and order.
-- Locks: none. Index: tsq's key; or tsq_domain_type, one entry for each of these types and command.
SELECT t.command
  FROM {kinds}
 CROSS JOIN LATERAL (
       SELECT t.command
         FROM commandbus.tsq t
        WHERE {range}
        ORDER BY {order}
        LIMIT %(bite)s) t
 ORDER BY t.command DESC
 LIMIT %(bite)s
