-- Notes that the keys of these commands were looked at. This transaction has locked their keys.
-- Locks: their rows, those that nobody else has locked; the others are looked at again. Index: the commands. (A plain
-- comparison of the state would offer keyed_new, all of it.)
UPDATE commandbus.keyed SET state = 'WAITING'
 WHERE command = ANY (ARRAY(SELECT k.command FROM commandbus.keyed k
                             WHERE k.command = ANY (%(commands)s::bigint[]) AND CASE WHEN k.state = 'NEW' THEN true ELSE false END
                               FOR UPDATE SKIP LOCKED))
