-- Deletes a key limit and its overrides, unless a command in line uses it. Returns whether one does, and whether it was there.
-- Locks: their rows. Indexes: keyed_line, keyed_released, key_limit_pkey, key_override_pkey.
WITH used AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM commandbus.keyed
                    WHERE domain = %(domain)s AND key_limit = %(name)s AND state IN ('NEW', 'WAITING'))
        OR EXISTS (SELECT FROM commandbus.keyed WHERE domain = %(domain)s AND key_limit = %(name)s AND state = 'RELEASED')
        AS is_used
), gone AS (
    DELETE FROM commandbus.key_limit
     WHERE domain = %(domain)s AND name = %(name)s AND NOT (SELECT is_used FROM used) RETURNING name
), overrides AS (
    DELETE FROM commandbus.key_override
     WHERE domain = %(domain)s AND key_limit = %(name)s AND NOT (SELECT is_used FROM used)
)
SELECT (SELECT is_used FROM used), EXISTS (SELECT FROM gone)
