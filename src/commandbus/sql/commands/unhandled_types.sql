-- The command types whose commands wait for a handler. Locks: none. Index: parked_reason, within the function.
SELECT domain, command_type, waiting, since, workers, seconds
  FROM commandbus.unhandled_types(%(domains)s::text[], %(most)s)
