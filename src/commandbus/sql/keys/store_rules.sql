-- Stores the key limits of command types; null: it has none. A row that says nothing any more is deleted.
-- Locks: these rows. Index: type_rule_pkey.
WITH input AS MATERIALIZED (
    SELECT x.* FROM ROWS FROM (
           pg_catalog.unnest(%(domains)s::text[]), pg_catalog.unnest(%(types)s::text[]), pg_catalog.unnest(%(limits)s::text[]),
           pg_catalog.unnest(%(paths)s::text[])) AS x(domain, command_type, key_limit, key_path)
     ORDER BY x.domain, x.command_type
), gone AS (
    DELETE FROM commandbus.type_rule r USING input i
     WHERE i.key_limit IS NULL AND r.domain = i.domain AND r.command_type = i.command_type AND r.priority IS NULL
    RETURNING r.domain, r.command_type
), cleared AS (
    UPDATE commandbus.type_rule r SET key_limit = NULL, key_path = NULL FROM input i
     WHERE i.key_limit IS NULL AND r.domain = i.domain AND r.command_type = i.command_type AND r.priority IS NOT NULL
)
INSERT INTO commandbus.type_rule (domain, command_type, key_limit, key_path)
SELECT domain, command_type, key_limit, key_path FROM input WHERE key_limit IS NOT NULL
ON CONFLICT (domain, command_type) DO UPDATE SET key_limit = excluded.key_limit, key_path = excluded.key_path
