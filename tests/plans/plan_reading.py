"""EXPLAIN of the statements that operations really run, and what their plans visited."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from commandbus.flow.operation import Operation, Statement

EXPLAIN = b"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON)\n"


def first_statement(operation: Operation[Any]) -> Statement:
    """The statement that an operation begins with, with the parameters it passes. A SET has no plan: the next
    one."""
    statement = next(operation.steps)
    while statement.sql.startswith(b"SET "):
        statement = operation.steps.send([])
    return statement


@dataclass(frozen=True)
class Scan:
    """One scan node: the relation and how many of its rows were looked at."""

    kind: str
    relation: str
    index: str | None
    visited: float


class Plan:
    """An executed plan."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.buffers: int = document["Plan"]["Shared Hit Blocks"] + document["Plan"]["Shared Read Blocks"]
        self.rows: float = document["Plan"]["Actual Rows"]

    def scans(self, relation: str) -> list[Scan]:
        return [scan for scan in _scans(self.document["Plan"]) if scan.relation == relation]

    def relations(self) -> set[str]:
        """The tables that it scans."""
        return {scan.relation for scan in _scans(self.document["Plan"])}

    def visited(self, relation: str) -> float:
        """Rows of this relation that were looked at, over all scans."""
        return sum(scan.visited for scan in self.scans(relation))

    @property
    def most_buffers(self) -> int:
        """Pages that its busiest node looked at, with all below it.

        The plan's own count leaves out statements within it that change something."""
        return max(
            node["Shared Hit Blocks"] + node["Shared Read Blocks"] for node in _nodes(self.document["Plan"])
        )

    def kinds(self, relation: str) -> set[str]:
        return {scan.kind for scan in self.scans(relation)}

    def __repr__(self) -> str:
        return f"{self.buffers} buffers: {list(_scans(self.document['Plan']))}"


def explain(conn: psycopg.Connection[Any], statement: Statement, *, generic: bool) -> Plan:
    """Run a statement in the connection's transaction, with a plan for these values or for any."""
    if not generic:
        row = conn.execute(EXPLAIN + statement.sql, statement.params, prepare=False).fetchone()
    else:
        row = _explain_generic(conn, statement)
    assert row is not None
    return Plan(row[0][0])


class Visits:
    """What a statement whose plan is inside a function has read, by the server's counters."""

    def __init__(self, rows: int, read: dict[str, tuple[int, int]]) -> None:
        self.rows = rows
        self._read = read

    def scanned(self, relation: str) -> int:
        """Rows that were read by scanning the whole table."""
        return self._read[relation][0]

    def fetched(self, relation: str) -> int:
        """Rows that were found by an index."""
        return self._read[relation][1]

    def __repr__(self) -> str:
        return f"{self.rows} rows; table: (scanned, fetched) {self._read}"


def visits(conn: psycopg.Connection[Any], statement: Statement, *, generic: bool) -> Visits:
    """Run a statement that calls a function, and count what it has read."""
    before = _counters(conn)
    mode = b"force_generic_plan" if generic else b"force_custom_plan"
    conn.execute(b"SET LOCAL plan_cache_mode = " + mode)
    rows = len(conn.execute(statement.sql, statement.params).fetchall())
    after = _counters(conn)
    return Visits(rows, {name: (after[name][0] - was[0], after[name][1] - was[1]) for name, was in before.items()})


def _counters(conn: psycopg.Connection[Any]) -> dict[str, tuple[int, int]]:
    rows = conn.execute(
        "SELECT relname, seq_tup_read, COALESCE(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables "
        "WHERE schemaname IN ('commandbus', 'pgmq')"
    )
    return {name: (scanned, fetched) for name, scanned, fetched in rows}


def _explain_generic(conn: psycopg.Connection[Any], statement: Statement) -> Any:
    text, values = numbered(statement)
    conn.execute("SET LOCAL plan_cache_mode = force_generic_plan")
    conn.execute(b"PREPARE examined AS\n" + text.encode())
    try:
        return conn.execute(sql.SQL(EXPLAIN.decode()) + execution("examined", values)).fetchone()
    finally:
        conn.execute("DEALLOCATE examined")
        conn.execute("RESET plan_cache_mode")


def numbered(statement: Statement) -> tuple[str, list[Any]]:
    """A statement as PREPARE wants it: $1 for the first parameter, and so on; and their values in this order."""
    params = statement.params or {}
    names: list[str] = []
    values: list[Any] = []

    def number(found: re.Match[str]) -> str:
        if found[0] == "%%":
            return "%"
        if found[1] is None:
            names.append("")
            values.append(params[len(values)])  # type: ignore[index]
        elif found[1] not in names:
            names.append(found[1])
            values.append(params[found[1]])  # type: ignore[call-overload]
        return f"${len(values) if found[1] is None else names.index(found[1]) + 1}"

    return re.sub(r"%\((\w+)\)s|%s|%%", number, statement.sql.decode()), values


def execution(name: str, values: list[Any]) -> sql.Composable:
    """EXECUTE of a prepared statement."""
    if not values:
        return sql.SQL("EXECUTE {}").format(sql.Identifier(name))
    return sql.SQL("EXECUTE {}({})").format(sql.Identifier(name), sql.SQL(", ").join(map(sql.Literal, values)))


def _scans(plan: dict[str, Any]) -> Iterator[Scan]:
    for node in _nodes(plan):
        if "Relation Name" in node and node["Node Type"] != "ModifyTable":
            removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
            visited = (node["Actual Rows"] + removed) * node["Actual Loops"]
            yield Scan(node["Node Type"], node["Relation Name"], node.get("Index Name"), visited)


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def plans_of(conn: psycopg.Connection[Any], operation: Operation[Any], *, generic: bool) -> tuple[Any, list[Plan]]:
    """Run an operation to its end: its result, and the plans of all its statements."""
    plans: list[Plan] = []
    steps = operation.steps
    try:
        statement = next(steps)
        while True:
            plans.append(explain(conn, statement, generic=generic))
            statement = steps.send(conn.execute(statement.sql, statement.params).fetchall())
    except StopIteration as end:
        return end.value, plans
