-- Sends commands of one domain as members of a batch. Returns how many were sent, and the first command_id that exists
-- already, if any; the caller then rolls back. Locks and indexes as in commands/send_many.sql; the batch row FOR KEY
-- SHARE.
SELECT sent, taken
  FROM commandbus.send_to_batch(%(domain)s, %(batch)s, %(rows)s::json, %(own_ids)s, %(counts)s)
