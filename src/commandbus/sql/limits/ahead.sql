-- How many wait for a limit ahead of a waiting command, or (without a command_id) ahead of a new command; and whether that
-- command waits. Locks: none. Indexes: parked_limit, command_domain_command_id_key.
WITH own AS MATERIALIZED (
    SELECT p.since, p.command, p.seq
      FROM commandbus.command c JOIN commandbus.parked p ON p.domain = c.domain AND p.msg_id = c.msg_id
     WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s AND p.limit_name = %(name)s AND p.woken_at IS NULL
)
SELECT (SELECT pg_catalog.count(*) FROM commandbus.parked p
         WHERE p.limit_name = %(name)s AND p.woken_at IS NULL
           AND (NOT EXISTS (SELECT FROM own) OR (p.since, p.command, p.seq) < (SELECT since, command, seq FROM own))),
       EXISTS (SELECT FROM own)
