-- Deletes a key limit and its overrides, unless a command in line or a command type uses it. Returns whether a command does, which types
-- do, and whether it was there.
-- Locks: their rows. Indexes: keyed_line, keyed_released, key_limit_pkey, key_override_pkey; type_rule is small.
WITH used AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM commandbus.keyed
                    WHERE domain = %(domain)s AND key_limit = %(name)s AND state IN ('NEW', 'WAITING'))
        OR EXISTS (SELECT FROM commandbus.keyed WHERE domain = %(domain)s AND key_limit = %(name)s AND state = 'RELEASED')
        AS by_commands,
           ARRAY(SELECT command_type FROM commandbus.type_rule WHERE domain = %(domain)s AND key_limit = %(name)s
                  ORDER BY command_type) AS by_types
), free AS MATERIALIZED (
    SELECT NOT by_commands AND pg_catalog.cardinality(by_types) = 0 AS is_free FROM used
), gone AS (
    DELETE FROM commandbus.key_limit
     WHERE domain = %(domain)s AND name = %(name)s AND (SELECT is_free FROM free) RETURNING name
), overrides AS (
    DELETE FROM commandbus.key_override
     WHERE domain = %(domain)s AND key_limit = %(name)s AND (SELECT is_free FROM free)
)
SELECT by_commands, by_types, EXISTS (SELECT FROM gone) FROM used
