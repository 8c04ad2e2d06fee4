-- Keeps replies whose queue is gone. Locks: new rows.
INSERT INTO commandbus.undelivered_reply (queue, message, reason)
SELECT %(queue)s, value, 'the queue does not exist, or the settling role may not write to it'
  FROM pg_catalog.jsonb_array_elements(%(messages)s::jsonb)
