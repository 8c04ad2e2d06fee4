-- Sends commands with keys (commandbus.send_keyed). It is a function because a producer may not read the lines of keys.
-- Locks and indexes: as the function says.
SELECT command_id, id, has_rule FROM commandbus.send_keyed(%(domain)s, %(rows)s::json)
