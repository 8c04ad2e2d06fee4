"""A stranger's functions and operators in the search path, which fit our calls better than PostgreSQL's own.

PostgreSQL looks for a function or an operator in all schemas of the search path, and takes the one whose argument
types fit best. Only among equally good ones pg_catalog comes first. So whoever may create in one of these schemas
decides what an unqualified call runs, unless pg_catalog has an exact match. A shadow that is called marks the
sequence `called`, which no rollback takes back, and then fails.

Shadows are written straight into the catalogs: 50,000 CREATE statements would take minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, LiteralString

import psycopg

FIRST_OID = 1_000_000_000

# Types of our columns, parameters and literals, and of the catalogs that we read.
_TYPES: LiteralString = """
SELECT array_agg(DISTINCT t) FROM (
    SELECT atttypid AS t FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid
     WHERE relnamespace::regnamespace::text IN ('commandbus', 'pgmq') AND attnum > 0 AND NOT attisdropped
       AND relkind IN ('r', 'p', 'v')
    UNION ALL
    SELECT unnest('{text,bigint,integer,smallint,numeric,float8,real,boolean,interval,timestamptz,json,jsonb,name,
                    oid,"char",uuid,bytea,regclass,text[],bigint[],integer[],smallint[],timestamptz[],oid[]}'::regtype[])
) types
"""

# One function per type, and per two types: all others are copies of these under another name.
_MAKE_FIRST: LiteralString = """
DO $do$
DECLARE
    pair record;
BEGIN
    FOR pair IN SELECT nullif(l.oid, 0)::regtype AS l, r.oid::regtype AS r
                  FROM unnest(array_prepend(0::oid, {types}::oid[])) AS l(oid), unnest({types}::oid[]) AS r(oid)
    LOOP
        EXECUTE format($sql$
            CREATE FUNCTION {schema}.shadow(%s) RETURNS boolean LANGUAGE plpgsql AS $body$ BEGIN
                PERFORM pg_catalog.setval('{schema}.called', 1);
                RAISE 'a shadow was called';
            END $body$ $sql$, concat_ws(',', pair.l, pair.r));
    END LOOP;
END $do$
"""

_COPY_FUNCTIONS: LiteralString = """
INSERT INTO pg_proc
SELECT (jsonb_populate_record(p, jsonb_build_object('oid', %(first)s + row_number() OVER (), 'proname', name))).*
  FROM pg_proc p, unnest(%(names)s::text[]) AS name
 WHERE p.pronamespace = %(schema)s::regnamespace AND p.proname = 'shadow'
"""

_MAKE_OPERATORS: LiteralString = """
INSERT INTO pg_operator (oid, oprname, oprnamespace, oprowner, oprkind, oprcanmerge, oprcanhash, oprleft, oprright,
                         oprresult, oprcom, oprnegate, oprcode, oprrest, oprjoin)
SELECT %(first)s + row_number() OVER (), name, pronamespace, proowner, CASE pronargs WHEN 1 THEN 'l' ELSE 'b' END,
       false, false, l, r,
       CASE WHEN name = ANY ('{+,-,*,/,->,#>,||,&,|,<<,>>}') THEN coalesce(nullif(l, 0), r)
            WHEN name = ANY ('{->>,#>>}') THEN 'text'::regtype
            ELSE 'boolean'::regtype END,
       0, 0, f, 0, 0
  FROM (SELECT oid AS f, pronamespace, proowner, pronargs, proargtypes[pronargs - 1] AS r,
               CASE pronargs WHEN 1 THEN 0 ELSE proargtypes[0] END AS l
          FROM pg_proc WHERE pronamespace = %(schema)s::regnamespace AND proname = 'shadow') functions,
       unnest(%(names)s::text[]) AS name
 WHERE (pronargs = 2 OR name = '-')
   AND NOT EXISTS (SELECT FROM pg_operator o WHERE oprname = name AND oprleft = l AND oprright = r
                      AND oprnamespace = 'pg_catalog'::regnamespace)
"""


def make_shadows(
    conn: psycopg.Connection[Any], *, functions: Iterable[str], operators: Iterable[str], schema: str = "public"
) -> None:
    """Functions of these names for each one and two types; operators where pg_catalog has none for them."""
    row = conn.execute(_TYPES).fetchone()
    assert row is not None
    types = "'{" + ",".join(map(str, row[0])) + "}'"
    conn.execute(f"CREATE SEQUENCE {schema}.called".encode())
    conn.execute(f"GRANT USAGE, UPDATE ON SEQUENCE {schema}.called TO PUBLIC".encode())
    conn.execute(_MAKE_FIRST.replace("{types}", types).replace("{schema}", schema).encode())
    with conn.transaction():
        conn.execute("SET LOCAL allow_system_table_mods = on")
        conn.execute("SET LOCAL search_path = pg_catalog")
        for statement, names in ((_COPY_FUNCTIONS, functions), (_MAKE_OPERATORS, operators)):
            made = conn.execute(statement, {"first": FIRST_OID, "schema": schema, "names": sorted(names)})
            assert made.rowcount > 0


def was_called(conn: psycopg.Connection[Any], schema: str = "public") -> bool:
    """Has a shadow been called? Asked as a superuser."""
    row = conn.execute(f"SELECT is_called FROM {schema}.called".encode()).fetchone()
    assert row is not None
    return bool(row[0])
