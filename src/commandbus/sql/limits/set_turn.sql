-- Moves a command in the line of a limit after its priority has changed, as commands/settle_park.sql would park it.
-- Locks: its row of parked. Indexes: parked_domain_msg_id_key, the command's key.
UPDATE commandbus.parked p
   SET since = (SELECT c.created_at + {turn_for c.priority} FROM commandbus.command c WHERE c.id = p.command)
 WHERE p.domain = %(domain)s AND p.msg_id = %(msg_id)s AND p.limit_name IS NOT NULL AND p.woken_at IS NULL
