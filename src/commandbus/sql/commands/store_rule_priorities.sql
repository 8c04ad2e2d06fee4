-- Stores the priorities of command types; null: it has none. A row that says nothing any more is deleted.
-- Locks: these rows, in the order of the key. Index: type_rule_pkey.
WITH input AS MATERIALIZED (
    SELECT x.* FROM ROWS FROM (
           pg_catalog.unnest(%(domains)s::text[]), pg_catalog.unnest(%(types)s::text[]),
           pg_catalog.unnest(%(priorities)s::smallint[])) AS x(domain, command_type, priority)
     ORDER BY x.domain, x.command_type
), gone AS (
    DELETE FROM commandbus.type_rule r USING input i
     WHERE i.priority IS NULL AND r.domain = i.domain AND r.command_type = i.command_type AND r.key_limit IS NULL
), cleared AS (
    UPDATE commandbus.type_rule r SET priority = NULL FROM input i
     WHERE i.priority IS NULL AND r.domain = i.domain AND r.command_type = i.command_type AND r.key_limit IS NOT NULL
)
INSERT INTO commandbus.type_rule (domain, command_type, priority)
SELECT domain, command_type, priority FROM input WHERE priority IS NOT NULL
ON CONFLICT (domain, command_type) DO UPDATE SET priority = excluded.priority
