-- The process that a command belongs to, and its role there. Locks: none. Indexes: the keys.
SELECT p.domain, p.process_id, c.step, s.name
  FROM commandbus.command c
  JOIN commandbus.process p ON p.id = c.process
  LEFT JOIN commandbus.process_step s ON s.process = c.process AND s.number = pg_catalog.abs(c.step)
 WHERE c.id = %(id)s
