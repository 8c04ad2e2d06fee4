"""Every SQL statement of the package as text that a parser takes: the files of `sql/`, and the literals in Python.

What a statement leaves open is filled in as the package does, with the longest of the choices. A literal in Python
that begins like a statement has to parse as one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import commandbus
from commandbus import sql
from commandbus.flow.batches import create as batch
from commandbus.flow.commands import claim, query, query_filters, query_sources, send
from commandbus.flow.commands import database_session as session
from commandbus.flow.commands import unhandled_types as unhandled
from commandbus.flow.queues import messages
from commandbus.model.command import CommandStatus

PACKAGE = Path(commandbus.__file__).parent
DOMAIN = "orders"

_BEGINS = re.compile(  # the column lists of GRANT, and the CHECK of a policy, are no statements
    r"\s*\(*\s*(SELECT\b(?!,)(?! \([\w, ]+\)$)|INSERT INTO|UPDATE (?!\()\S+ |DELETE FROM|WITH (?!CHECK)\w+|VALUES)"
)
_WRITTEN = re.compile(f"[\"']{_BEGINS.pattern}")
_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%s|%%")
_BODY = re.compile(
    r"CREATE (?:OR REPLACE )?FUNCTION (?P<name>\S+?)\((?P<head>.*?)\$\$(?P<body>.*?)\$\$", re.DOTALL
)
_PARTS_ONLY = {
    "commands/others_due",
    "limits/claimable",
    "effects/fence",
    "plans/chosen",
    "plans/lock",
    "batches/settle_done_batches",
    "commands/settle_batches_and_processes",
}
_HOLE = "hole"
_LOCKING = {
    "breakers/lock": "FOR UPDATE",
    "limits/client_list": "FOR UPDATE",
    "limits/rows": "FOR NO KEY UPDATE OF l",
    "plans/query": "FOR UPDATE",
}
_ORDER = {
    "limits/next": "(%(vain)s::jsonb ->> p.command::text)::integer, p.since, p.command, p.seq",
    "commands/find_troubled": "t.command DESC",
    "commands/list_tsq": "t.command",
}
_RANGE = {
    "commands/find_troubled": "t.command < %(before_id)s::bigint",
    "commands/list_tsq": "t.command > %(after_id)s::bigint",
}
_CHOSEN = {
    "limits/next": "NOT (%(vain)s::jsonb ? p.command::text)",
    "plans/changes": sql.part("plans/chosen"),
    "plans/preview": sql.part("plans/chosen"),
}
_JOINED = {  # what the code joins to a text when it runs
    "SELECT pg_catalog.pg_cancel_backend(pid)": session._IT,
    "SELECT pg_catalog.pg_terminate_backend(pid, 2000)": session._IT,
}
_ELSEWHERE = {"testing"}  # handlers that misbehave on purpose, for users' tests


class Found(NamedTuple):
    """A statement, and where it is."""

    place: str
    text: str
    """With `$1`, `$2`, … for the parameters."""

    @property
    def is_whole(self) -> bool:
        """Does it name only what is there? Where the code puts in a name, `hole` stands."""
        return _HOLE not in self.text


class Body(NamedTuple):
    """What a function of the schema is made of."""

    name: str
    head: str
    text: str


def statements() -> list[Found]:
    """All of them but the migrations."""
    return [*_in_files(), *_in_python()]


def bodies() -> list[Body]:
    """Those of the schema's own functions: the server reads them with the search path of whoever calls."""
    texts = [text for _, text in sql.migrations().values()]
    return [Body(found["name"], found["head"], found["body"]) for text in texts for found in _BODY.finditer(text)]


def _in_files() -> Iterator[Found]:
    for path in sorted((PACKAGE / "sql").rglob("*.sql")):
        name = path.relative_to(PACKAGE / "sql").with_suffix("").as_posix()
        if not name.startswith("migrations/") and name not in _PARTS_ONLY:
            parts = {
                "locking": _LOCKING.get(name, "SKIP LOCKED"),
                "order": _ORDER.get(name, query._BY_BATCH.order),
                "chosen": _CHOSEN.get(name, "true"),
                "range": _RANGE.get(name, query._BY_BATCH.range),
                "filters": "".join(query_filters._FILTERS.values()) + query_filters._AT_PATH.replace("{n}", "0"),
                "verdicts": query_sources._ENDS[CommandStatus.CANCELED][0],
                "matches": "true",
                "after": "AND a.finished_at >= %(after)s",
                "schema": _HOLE,  # where the extension is
                "kinds": "pg_catalog.unnest(%(types)s::text[]) AS kind (name)",
                "claimable": sql.part("limits/claimable"),
                "fence": sql.part("effects/fence"),
                "lock": sql.part("plans/lock"),
                "groups": sql.part(
                    "batches/settle_done_batches"
                    if name == "commands/settle_done"
                    else "commands/settle_batches_and_processes"
                ),
                **send.CALLERS_IDS,
                **batch._RETRIES,
                "kind": claim.OURS,
                "others": sql.part("commands/others_due"),
                "shift": claim._SHIFTS[claim.HIGH],
                "shift_back": claim._SHIFTS[claim.LOW],
                "due": "q.vt",
                "table": "rejected_message",
                "failed_in": "attempt",
                "of_age": unhandled._OF_AGE,
                **messages.LAST_READ,
            }
            yield Found(f"{name}.sql", _numbered(sql.text(name, domain=DOMAIN, **parts).decode()))


def _in_python() -> Iterator[Found]:
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        code = path.read_text("utf-8")
        if place.parts[0] not in _ELSEWHERE and _WRITTEN.search(code):  # to parse all of them takes a second
            for line, text in _literals(ast.parse(code)):
                if _BEGINS.match(text):
                    yield Found(f"{place}:{line}", _numbered(text + _JOINED.get(text, b"").decode()))


def _numbered(text: str) -> str:
    """psycopg's placeholders as the server wants them."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        if match.group() == "%%":
            return "%"
        name = match.group(1) or f"at {match.start()}"
        return f"${numbers.setdefault(name, len(numbers) + 1)}"

    return _PLACEHOLDER.sub(number, text)


def _literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts, joined as the code joins them; no docstrings."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and (text := _rendered(node)) is not None:
        yield node.lineno, text
        return
    for child in ast.iter_child_nodes(node):
        yield from _literals(child)


def _rendered(node: ast.expr) -> str | None:
    """A text as far as it is written there; None for what is no text."""
    match node:
        case ast.Constant(value=bytes() as value):
            return value.decode(errors="replace")
        case ast.Constant(value=str() as value):
            return value
        case ast.JoinedStr(values=values):
            return "".join(_rendered(value) or _HOLE for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            first, second = _rendered(left), _rendered(right)
            return None if first is None and second is None else (first or _HOLE) + (second or _HOLE)
    return None
