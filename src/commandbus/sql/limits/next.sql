-- The parked commands that are next in line at a limit, in the order of `since`. For a probe, `vain` says how many probes
-- of each command have failed. Commands that it does not name come first; if there are none, `order` puts those with the
-- fewest first. The last columns are the same in every row: does a caller wait inside a program, and for how many seconds
-- has a command whose turn came not been claimed (null if all are claimed)?
-- Locks: none (the caller has locked the limit's row, so no other program wakes its waiters).
-- Index: parked_limit, in its order; with another order it reads only as many rows as `vain` names. The last columns go
-- by parked_domain_msg_id_key and parked_woken: both lists are short.
SELECT p.seq, p.domain, p.msg_id, p.token, p.since,
       (SELECT c.domain || '/' || c.command_id FROM commandbus.command c WHERE c.id = p.command), p.command,
       EXISTS (SELECT FROM (SELECT limit_name, woken_at FROM commandbus.parked WHERE domain = '' OFFSET 0) call
                WHERE call.limit_name = %(name)s AND call.woken_at IS NULL),
       (SELECT extract(epoch FROM pg_catalog.now() - pg_catalog.min(woken.woken_at))::float8
          FROM (SELECT limit_name, domain, woken_at FROM commandbus.parked WHERE woken_at <= pg_catalog.now() OFFSET 0) woken
         WHERE woken.limit_name = %(name)s AND woken.domain <> '')
  FROM commandbus.parked p
 WHERE p.limit_name = %(name)s AND p.woken_at IS NULL AND {claimable}
   AND NOT (p.domain = '' AND p.give_up_at <= pg_catalog.clock_timestamp())
   AND {chosen}
 ORDER BY {order}
 LIMIT %(most)s
