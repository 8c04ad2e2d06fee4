-- The commands with these ids, for the holders of a limit's permits. Locks: none. Index: command_pkey.
SELECT id, domain, command_id, command_type, msg_id
  FROM commandbus.command
 WHERE id = ANY (%(ids)s::bigint[])
