-- Removes a bite of commands from the lines of keys that have ended without having been released: canceled, expired, pruned.
-- Locks: their rows, those that nobody else has locked. Indexes: the keys of keyed and command.
WITH bite AS MATERIALIZED (
    SELECT command FROM commandbus.keyed
     WHERE command > %(after)s AND domain = ANY (%(domains)s::text[]) AND state <> 'RELEASED' ORDER BY command LIMIT %(bite)s
)
DELETE FROM commandbus.keyed
 WHERE command = ANY (ARRAY(
       SELECT k.command FROM commandbus.keyed k
        WHERE k.command = ANY (ARRAY(
              SELECT b.command FROM bite b
               WHERE NOT EXISTS (
                     SELECT FROM commandbus.command c
                      WHERE c.id = b.command
                        AND c.status OPERATOR(pg_catalog.=) ANY ('{PENDING,IN_TROUBLESHOOTING_QUEUE}'::commandbus.command_status[]))))
          FOR UPDATE SKIP LOCKED))
