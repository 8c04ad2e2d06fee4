-- Notes what became of commands of a plan that it did not simply move: skipped, locked by others, or not locked any more.
-- Locks: their rows in its set, which nobody else writes. Index: the key.
UPDATE commandbus.plan_command
   SET is_skipped = command = ANY (%(skipped)s::bigint[]), is_locked = command = ANY (%(locked)s::bigint[])
 WHERE plan = %(plan)s
   AND (command = ANY (%(skipped)s::bigint[]) OR command = ANY (%(locked)s::bigint[]) OR command = ANY (%(unlocked)s::bigint[]))
