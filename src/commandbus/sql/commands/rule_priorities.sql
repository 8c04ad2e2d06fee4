-- The priorities that the rules of these command types have.
-- Locks: none. Index: type_rule_pkey.
SELECT r.domain, r.command_type, r.priority
  FROM ROWS FROM (pg_catalog.unnest(%(domains)s::text[]), pg_catalog.unnest(%(types)s::text[])) AS x(domain, command_type)
  JOIN commandbus.type_rule r ON r.domain = x.domain AND r.command_type = x.command_type AND r.priority IS NOT NULL
