-- A bite of the troubleshooting queue, longest waiting first, by the caller's condition and order. Rows that do not match come
-- without their commands, so that the caller knows how far it has looked.
-- Locks: none. Index: tsq's key; or tsq_domain_type, a bite for each of these types. Then the command's key, for those that match.
SELECT t.command, c.command_id IS NOT NULL, c.domain, c.command_id, c.command_type, t.entered_at, t.attempt, t.error_type,
       t.error_code, t.error, c.data::text
  FROM (SELECT t.*
          FROM {kinds}
         CROSS JOIN LATERAL (
               SELECT t.*, {matches} AS matches
                 FROM commandbus.tsq t
                WHERE {range}
                ORDER BY {order}
                LIMIT %(bite)s) t
         ORDER BY t.command
         LIMIT %(bite)s) t
  LEFT JOIN LATERAL (
       SELECT k.domain, k.command_id, k.command_type, k.data
         FROM commandbus.command k
        WHERE k.id = t.command AND t.matches
       OFFSET 0) c ON true
 ORDER BY t.command
