-- Which of the privileges that a worker needs does this role have? One row per privilege: whether its table exists, and
-- whether the role has the privilege (at least on a column). The schema's own USAGE comes as a row without a table.
--
-- Locks: none. Catalogs only, by name: everybody may read them, even without rights on the schema.
SELECT current_user::text, w.schema, w.name, w.privilege,
       CASE WHEN w.name = '' THEN n.oid IS NOT NULL ELSE c.oid IS NOT NULL END,
       CASE WHEN w.name = '' THEN pg_catalog.has_schema_privilege(n.oid, w.privilege)
            WHEN w.privilege = 'DELETE' THEN pg_catalog.has_table_privilege(c.oid, w.privilege)
            ELSE pg_catalog.has_any_column_privilege(c.oid, w.privilege) END
  FROM ROWS FROM (pg_catalog.unnest(%(schemas)s::text[]), pg_catalog.unnest(%(names)s::text[]),
                  pg_catalog.unnest(%(privileges)s::text[])) WITH ORDINALITY AS w (schema, name, privilege, place)
  LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = w.schema::pg_catalog.name
  LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.name::pg_catalog.name
 ORDER BY w.place
