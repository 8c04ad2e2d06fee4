-- Notes that commands of a plan were skipped. Locks: their rows in its set, which nobody else writes. Index: the key.
UPDATE commandbus.plan_command SET is_skipped = true
 WHERE plan = %(plan)s AND command = ANY (%(skipped)s::bigint[])
