-- Where a walk over commands has looked at as many as one call may: the id of the last of them. No row: the walk reaches its end.
-- Locks: none. Index: the one that the walk takes, without the table where the visibility map allows it.
SELECT c.id
  FROM commandbus.command c
 WHERE {range}
 ORDER BY {order}
OFFSET %(budget)s - 1
 LIMIT 1
