-- The first in the line of a limit, in their order, at most so many: commands, and callers inside programs (their domain is
-- empty, and they are named by who asked). Locks: none. Indexes: parked_limit, command_pkey.
SELECT p.domain, c.command_id, p.command_type, p.parked_at, p.note
  FROM (SELECT since, command, seq, domain, command_type, parked_at, note
          FROM commandbus.parked
         WHERE limit_name = %(name)s AND woken_at IS NULL
         ORDER BY since, command, seq
         LIMIT %(most)s) p
  LEFT JOIN commandbus.command c ON c.id = p.command AND p.domain <> ''
 ORDER BY p.since, p.command, p.seq
