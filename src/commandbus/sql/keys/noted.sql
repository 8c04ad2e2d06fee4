-- Notes that the keys of these commands were looked at. This transaction has locked their keys.
-- Locks: their rows, those that nobody else has locked; the others are looked at again. Index: the commands.
UPDATE commandbus.keyed SET state = 'WAITING'
 WHERE command = ANY (ARRAY(SELECT k.command FROM commandbus.keyed k
                             WHERE k.command = ANY (%(commands)s::bigint[]) AND k.state = 'NEW'
                               FOR UPDATE SKIP LOCKED))
