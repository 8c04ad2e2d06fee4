"""database_report: dead rows and vacuum, open transactions and who holds them, connections, slow statements.

Reads only the server's statistics, locks nothing, and needs no special role. What sessions of other roles do is
hidden from a role that is no member of pg_read_all_stats: the report says how many hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from datetime import datetime
from itertools import starmap
from typing import Final

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.quick_dataclass import dataclass

MOST_TABLES: Final = 100
MOST_HOLDERS: Final = 20
MOST_CONNECTIONS: Final = 100
MOST_STATEMENTS: Final = 20
LONG_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class TableHealth:
    """A table. `vacuumed_at` is None if it never was, or not since the statistics were reset. `xid_age`: the
    server vacuums by force when this reaches `DatabaseReport.freeze_max_age`."""

    name: str
    live_rows: int
    dead_rows: int
    total_bytes: int
    vacuumed_at: datetime | None
    analyzed_at: datetime | None
    xid_age: int

    @property
    def dead_share(self) -> float:
        """The dead rows among all, from 0 to 1."""
        return self.dead_rows / max(self.live_rows + self.dead_rows, 1)


@dataclass(frozen=True, slots=True)
class TransactionHolder:
    """Who has a transaction open, or keeps old row versions alive: a "session" (`name` is its pid), a "prepared
    transaction" or a "replication slot". `blocked_by` are the pids that it waits for."""

    kind: str
    name: str
    role: str | None
    application: str | None
    client: str | None
    state: str | None
    seconds: float | None
    xid_age: int | None
    waits_for: str | None
    blocked_by: list[int] | None
    query: str | None


@dataclass(frozen=True, slots=True)
class RoleConnections:
    """The connections of one role and program. `hidden`: how many hide what they do."""

    role: str
    application: str
    total: int
    active: int
    idle_in_transaction: int
    hidden: int


@dataclass(frozen=True, slots=True)
class SlowStatement:
    """A statement of ours, over all its calls."""

    query: str
    calls: int
    total_seconds: float
    mean_ms: float
    max_ms: float
    rows: int


@dataclass(frozen=True, slots=True)
class DatabaseReport:
    """What the server says. `why_no_statements` says why there are none, and what to do about it."""

    version: str
    max_connections: int
    used_connections: int
    freeze_max_age: int
    autovacuum: bool
    total_bytes: int
    tables: list[TableHealth]
    holders: list[TransactionHolder]
    connections: list[RoleConnections]
    statements: list[SlowStatement] = field(default_factory=list)
    why_no_statements: str | None = None

    @property
    def hidden_sessions(self) -> int:
        """How many sessions of other roles hide what they do from this role."""
        return sum(item.hidden for item in self.connections)

    @property
    def oldest(self) -> TransactionHolder | None:
        """The oldest open transaction, if any."""
        return next((item for item in self.holders if item.seconds is not None), None)


@operation(atomic=False)
def database_report() -> Steps[DatabaseReport]:
    """Everything at once."""
    (server,) = yield Statement(sql.text("database/server"))
    version, allowed, used, freeze_age, autovacuum, schema, size = server
    tables = yield Statement(sql.text("database/tables"), {"most": MOST_TABLES})
    holders = yield Statement(sql.text("database/holders"), {"most": MOST_HOLDERS})
    connections = yield Statement(sql.text("database/connections"), {"most": MOST_CONNECTIONS})
    statements, why = yield from _statements(schema)
    found = [replace(item, query=_readable(item.query)) for item in starmap(TransactionHolder, holders)]
    return DatabaseReport(
        version=version, max_connections=allowed, used_connections=used, freeze_max_age=freeze_age,
        autovacuum=autovacuum, total_bytes=size, tables=list(starmap(TableHealth, tables)),
        holders=found, connections=list(starmap(RoleConnections, connections)),
        statements=list(statements), why_no_statements=why,
    )  # fmt: skip


def _statements(schema: str | None) -> Steps[tuple[Sequence[SlowStatement], str | None]]:
    if schema is None:
        return [], (
            "pg_stat_statements is not installed in this database: add it to shared_preload_libraries, restart "
            "the server, and run CREATE EXTENSION pg_stat_statements"
        )
    quoted = '"' + schema.replace('"', '""') + '"'
    try:
        rows = yield Statement(sql.text("database/statements", schema=quoted), {"most": MOST_STATEMENTS})
    except pg.ObjectNotInPrerequisiteState:
        return [], (
            "pg_stat_statements is installed, but the server has not loaded it: add it to "
            "shared_preload_libraries, and restart the server"
        )
    except pg.InsufficientPrivilege:
        return [], "this role may not read pg_stat_statements: GRANT pg_read_all_stats to it"
    return [replace(item, query=_readable(item.query) or "") for item in starmap(SlowStatement, rows)], None


def _readable(query: str | None) -> str | None:
    """A statement in one line, without the comments that ours begin with. The server keeps the beginning of a
    statement only: if that is nothing but a comment, the comment says what it is."""
    if query is None:
        return None
    lines = [line.strip() for line in query.splitlines()]
    code = " ".join(line for line in lines if line and not line.startswith("--"))
    return code or " ".join(line.lstrip("- ") for line in lines if line)
