"""Every statement of ours means the same in every search path, but for one that names pg_catalog behind others.

Parsed by PostgreSQL's own parser: functions and tables have a schema, types are PostgreSQL's own or ours. Read by
a server beside 17,000 operators of a stranger: none of these is chosen, whatever types the parameters have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from pglast import ast, parse_sql
from pglast.visitors import Skip, Visitor
from psycopg.pq import ExecStatus

from commandbus import CommandBus
from support import shadows, statements
from support.statements import Found

# PostgreSQL's own types, found there before any but a temporary one, which only the session itself can make.
TYPES = {"text", "json", "jsonb", "float8", "timestamptz", "uuid", "oid", "char", "regnamespace"}
INT2, INT4, INT8, FLOAT8, NUMERIC = 21, 23, 20, 701, 1700
ALL = statements.statements()


class Names(Visitor):
    """What a statement names without a schema, and which operators it has."""

    def __init__(self) -> None:
        super().__init__()
        self.bare: list[str] = []
        self.operators: set[str] = set()
        self._tables: list[str] = []
        self._ctes: set[str] = set()

    def visit_FuncCall(self, _: Any, node: ast.FuncCall) -> None:  # noqa: N802
        name = node.funcname[-1].sval
        # unnest of several arrays is no function: the parser itself makes pg_catalog.unnest of each of them.
        if len(node.funcname) == 1 and not (name == "unnest" and len(node.args) > 1):
            self.bare.append(f"function {name}")

    def visit_TypeName(self, _: Any, node: ast.TypeName) -> None:  # noqa: N802
        if node.names and len(node.names) == 1 and node.names[0].sval not in TYPES:
            self.bare.append(f"type {node.names[0].sval}")

    def visit_A_Expr(self, _: Any, node: ast.A_Expr) -> None:  # noqa: N802
        if len(node.name) == 1:
            self.operators.add(node.name[0].sval)

    def visit_CommonTableExpr(self, _: Any, node: ast.CommonTableExpr) -> None:  # noqa: N802
        self._ctes.add(node.ctename)

    def visit_LockingClause(self, _: Any, node: ast.LockingClause) -> type[Skip]:  # noqa: N802
        return Skip  # names aliases

    def visit_RangeVar(self, _: Any, node: ast.RangeVar) -> None:  # noqa: N802
        if not node.schemaname:
            self._tables.append(node.relname)

    def all(self) -> list[str]:
        """What has no schema and needs one."""
        return self.bare + [f"table {name}" for name in self._tables if name not in self._ctes]


def _names(text: str) -> Names:
    names = Names()
    names(parse_sql(text))
    return names


def _operators() -> set[str]:
    return set().union(*(_names(found.text).operators for found in ALL)) | {"=", "<>", "<", "<=", ">", ">="}


@pytest.mark.parametrize("found", ALL, ids=lambda found: found.place)
def test_every_name_has_its_schema(found: Found) -> None:
    assert _names(found.text).all() == []


@pytest.mark.parametrize("body", statements.bodies(), ids=lambda body: body.name)
def test_functions_of_the_schema_keep_their_search_path_or_need_none(body: statements.Body) -> None:
    if "SET search_path" not in body.head:
        assert "LANGUAGE sql" in body.head
        assert _names(body.text).all() == []


def test_the_check_sees_what_has_no_schema() -> None:
    seen = _names(
        "WITH a AS (SELECT now()) SELECT x::app_type, pg_catalog.now(), unnest(b), x -> 'y' FROM a, pg_class, "
        "pg_catalog.pg_proc, unnest(b, c)"
    )
    assert sorted(seen.all()) == ["function now", "function unnest", "table pg_class", "type app_type"]
    assert len(ALL) > 200
    assert any(found.place.startswith("flow/") for found in ALL)


@pytest.fixture(scope="module")
def trees(migrated_template: str, databases: Any) -> Iterator[Trees]:
    """A session whose search path has the stranger's schema in it."""
    with databases.lend(used=False) as address:
        with CommandBus(address) as bus:
            bus.create_domain(statements.DOMAIN)
        with psycopg.connect(address, autocommit=True) as conn:
            conn.execute("CREATE SCHEMA stranger")
            shadows.make_shadows(conn, functions=["unused"], operators=_operators(), schema="stranger")
            yield Trees(conn)


class Trees:
    """What the server makes of a statement's text: it prints the tree, in which every operator is an oid."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn
        self._printed: list[str] = []
        conn.add_notice_handler(lambda notice: self._printed.append(notice.message_detail or ""))
        conn.execute("SET debug_print_parse = on; SET debug_pretty_print = off; SET client_min_messages = log")

    def chosen(self, text: str, types: list[int] | None = None) -> list[str] | None:
        """The stranger's operators in it; None if there is no such statement for these types of parameters."""
        if not self._reads(text, types, path="pg_catalog"):
            return None
        if not self._reads(text, types, path="public, stranger"):
            return ["some operator that gives another type"]
        oids = [int(oid) for tree in self._printed for oid in re.findall(r"\b1\d{9}\b", tree)]
        self._conn.execute("SET search_path = pg_catalog")
        found = self._conn.execute(
            "SELECT format('%%s(%%s,%%s)', oprname, oprleft::regtype, oprright::regtype) FROM pg_operator "
            "WHERE oid = ANY (%s::oid[])",
            [oids],
        )
        return [name for (name,) in found.fetchall()]

    def types(self, text: str) -> list[int]:
        """What the server takes the parameters for if nobody says."""
        assert self._reads(text, None, path="pg_catalog"), "it can be read at all"
        described = self._conn.pgconn.describe_prepared(b"")
        return [described.param_type(number) for number in range(described.nparams)]

    def _reads(self, text: str, types: list[int] | None, *, path: str) -> bool:
        self._conn.execute(f"SET search_path = {path}".encode())
        self._printed.clear()
        return self._conn.pgconn.prepare(b"", text.encode(), types).status == ExecStatus.COMMAND_OK


@pytest.mark.shared_setup
@pytest.mark.parametrize("found", [found for found in ALL if found.is_whole], ids=lambda found: found.place)
def test_no_operator_can_be_replaced(trees: Trees, found: Found) -> None:
    """psycopg says the types of numbers: an int is a smallint, an integer or a bigint, as large as it is."""
    types = trees.types(found.text)
    numbers = (INT2, INT4, INT8, FLOAT8, NUMERIC)
    assert trees.chosen(found.text) == []
    for number in (INT2, INT8):
        assert not trees.chosen(found.text, [number if type_ in numbers else type_ for type_ in types])


@pytest.mark.shared_setup
def test_the_check_sees_an_operator_that_can_be_replaced(trees: Trees) -> None:
    for replaceable, safe in (
        ("SELECT message -> 'a' FROM pgmq.q_orders__commands",
         "SELECT message -> 'a'::text FROM pgmq.q_orders__commands"),
        ("SELECT FROM commandbus.command WHERE status = 'PENDING'",
         "SELECT FROM commandbus.command WHERE status OPERATOR(pg_catalog.=) 'PENDING'"),
        ("SELECT 'cancel ' || id FROM commandbus.command", "SELECT 'cancel ' || id::text FROM commandbus.command"),
    ):  # fmt: skip
        assert trees.chosen(replaceable)
        assert trees.chosen(safe) == []


@pytest.mark.shared_setup
def test_the_check_sees_a_parameter_whose_type_lets_an_operator_be_replaced(trees: Trees) -> None:
    text = "SELECT FROM commandbus.command WHERE timeout > $1"
    assert trees.chosen(text) == []
    assert trees.chosen(text, [INT2]) == [">(double precision,smallint)"]
    assert trees.chosen(f"{text}::float8", [INT2]) == []
