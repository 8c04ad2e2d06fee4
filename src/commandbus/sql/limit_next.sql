-- Whose turn is next at a limit: by `since`, or, for a probe, who has probed least often. Locks: none (the caller holds the limit's row, so nobody else wakes its waiters).
-- Index: parked_limit.
SELECT p.seq, p.domain, p.msg_id, p.token, p.since,
       (SELECT c.domain || '/' || c.command_id FROM commandbus.command c WHERE c.id = p.command)
  FROM commandbus.parked p
 WHERE p.limit_name = %(name)s AND p.woken_at IS NULL AND {claimable}
   AND NOT (p.domain = '' AND p.give_up_at <= pg_catalog.clock_timestamp())
 ORDER BY {order}
 LIMIT %(most)s
