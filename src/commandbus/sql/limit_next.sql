-- Whose turn is next at a limit: by `since`. For a probe, `vain` says how often which command was that in vain: those that
-- it does not name come first; if there are none, `order` puts those with the fewest first.
-- Locks: none (the caller holds the limit's row, so nobody else wakes its waiters).
-- Index: parked_limit, in its order; with another order it reads only as many rows as `vain` names.
SELECT p.seq, p.domain, p.msg_id, p.token, p.since,
       (SELECT c.domain || '/' || c.command_id FROM commandbus.command c WHERE c.id = p.command), p.command
  FROM commandbus.parked p
 WHERE p.limit_name = %(name)s AND p.woken_at IS NULL AND {claimable}
   AND NOT (p.domain = '' AND p.give_up_at <= pg_catalog.clock_timestamp())
   AND {chosen}
 ORDER BY {order}
 LIMIT %(most)s
