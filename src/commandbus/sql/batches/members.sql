-- A bite of a batch's members and their states, after a given id.
--
-- Locks: none. Index: command_batch, in its order. With `=` on the batch, the members would be ordered by id alone, and
-- the planner would search for a large batch along the key, over all commands. With a condition on the state, it would
-- read the whole batch for every bite.
SELECT id, status::text
  FROM commandbus.command
 WHERE (batch, id) > (%(batch)s, %(after_id)s) AND batch <= %(batch)s
 ORDER BY batch, id
 LIMIT %(bite)s
