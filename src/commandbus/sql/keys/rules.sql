-- The rules of these command types that name a key limit.
-- Locks: none. Index: type_rule_pkey.
SELECT r.domain, r.command_type, r.key_limit, r.key_path
  FROM ROWS FROM (pg_catalog.unnest(%(domains)s::text[]), pg_catalog.unnest(%(types)s::text[])) AS x(domain, command_type)
  JOIN commandbus.type_rule r ON r.domain = x.domain AND r.command_type = x.command_type AND r.key_limit IS NOT NULL
