-- A bite of a batch's members and their states, after a given id.
--
-- Locks: none. Index: command_batch, in its order. (Were the batch given by `=`, its members would be ordered by id alone,
-- and the planner would look for a large batch's along the key, over all commands. A condition on the state would make it
-- read the whole batch for every bite.)
SELECT id, status::text
  FROM commandbus.command
 WHERE (batch, id) > (%(batch)s, %(after_id)s) AND batch <= %(batch)s
 ORDER BY batch, id
 LIMIT %(bite)s
