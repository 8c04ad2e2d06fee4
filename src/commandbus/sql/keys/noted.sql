-- Notes that the keys of these commands were looked at.
-- Locks: their rows; this transaction has locked their keys. Index: the commands.
UPDATE commandbus.keyed SET state = 'WAITING' WHERE command = ANY (%(commands)s::bigint[]) AND state = 'NEW'
