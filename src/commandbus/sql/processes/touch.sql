-- Counts a move that changes nothing, if the process has not moved since it was read: a signal came, and no step waits for
-- it. A move that has begun, and did not see the signal, is refused by this. Returns no row if the process has moved.
--
-- Locks: the process row. Index: the key.
UPDATE commandbus.process
   SET version = version + 1, updated_at = pg_catalog.now()
 WHERE id = %(id)s AND version = %(version)s
RETURNING id
