-- Writes what programs hold. Only under the lock of limit_mode. Locks: their rows. Index: limit_client_pkey.
UPDATE commandbus.limit_client c
   SET held = x.held
  FROM unnest(%(ids)s::text[], %(held)s::jsonb[]) AS x(id, held)
 WHERE c.id = x.id
