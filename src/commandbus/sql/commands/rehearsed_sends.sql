-- The commands that the present transaction has sent, after an id. Rows that are visible while their transaction is in progress are
-- its own, also those of its savepoints. Locks: none. Index: the key.
SELECT domain AS commandbus_rehearsal, command_type, command_id
  FROM commandbus.command
 WHERE id > %(after)s
   AND pg_catalog.pg_xact_status(((pg_catalog.pg_current_xact_id()::text::bigint >> 32 << 32)
                                  | xmin::text::bigint)::text::pg_catalog.xid8) = 'in progress'
 ORDER BY id
 LIMIT 100
