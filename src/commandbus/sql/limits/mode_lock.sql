-- Locks the row that says where the permits of Redis limits are kept. Under this lock, one program at a time decides about
-- that, and about the permits that PostgreSQL keeps meanwhile. Locks: that row. Index: limit_mode_pkey.
SELECT mode, epoch, extract(epoch FROM since)::float8, extract(epoch FROM until)::float8
  FROM commandbus.limit_mode
 WHERE id = 1
   FOR UPDATE
