"""Small tables that have all commands which can match a query, so that nobody looks for them among all commands.

Each source gives ids of commands in bites, newest first. It may give some that do not match: the caller checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.commands.domains import all_domains, no_queue
from commandbus.flow.commands.query_filters import CommandQuery
from commandbus.flow.commands.tsq import entries, types_of
from commandbus.flow.operation import Row, Statement, Steps
from commandbus.model.command import CommandStatus

BITE: Final = 2_000  # rows that one statement looks at
FEW: Final = 2_000  # a domain or a queue with fewer commands is read whole
MOST_HELD: Final = 10_000
_ENDS: Final = {
    CommandStatus.FAILED: ("('FAILED', 'BUSINESS_RULE', 'TIMED_OUT')", False),
    CommandStatus.CANCELED: ("('CANCELED', 'EXPIRED')", True),
}


Found = tuple[list[int], int, bool]  # ids newest first, the last id looked at, and whether that was the end
Source = Callable[[int, int], Steps[Found]]  # given: before which id, and how many rows it may look at


def source_of(
    query: CommandQuery, params: Mapping[str, Any], status: CommandStatus | None
) -> Steps[Source | None]:
    """The small table that has all that can match, if there is one."""
    if query.command_id is not None:
        ids = yield from _named(params["command_id"])
        return listed(ids)
    if status is CommandStatus.IN_TROUBLESHOOTING_QUEUE:
        types = yield from types_of(params["domain"], params["command_type"])
        return _troubled(params, types)
    if status is CommandStatus.PENDING:
        found = yield from _few_queued(params["domain"])
        return None if found is None else listed(found)
    if query.error is not None:
        return _with_error(params["error"])
    return None if status not in _ENDS else _ended(*_ENDS[status])


def listed(ids: Sequence[int]) -> Source:
    """A source that is known whole."""
    ordered = sorted(set(ids), reverse=True)

    def look(before: int, bite: int) -> Steps[Found]:
        yield from ()
        picked = [id_ for id_ in ordered if id_ < before][:bite]
        return picked, picked[-1] if picked else 0, len(picked) < bite

    return look


def _troubled(params: Mapping[str, Any], types: list[str] | None) -> Source:
    parts = entries(types, edge="%(before_id)s::bigint", is_newest_first=True)
    return _bites(sql.text("commands/find_troubled", **parts), {"domain": params["domain"], "types": types})


def _ended(verdicts: str, by_people: bool) -> Source:  # noqa: FBT001 - from a table
    return _bites(sql.text("commands/find_ended", verdicts=verdicts), {"by_people": by_people})


def _with_error(text: str) -> Source:
    """Attempts whose errors contain a text. The last command of a bite may have more attempts than were read, so
    the next one begins with it, unless it has filled the whole bite."""
    statement = sql.text("commands/find_errors")

    def look(before: int, bite: int) -> Steps[Found]:
        bite = max(bite, BITE)
        rows = yield Statement(statement, {"error": text, "before_id": before, "bite": bite})
        ids = dict.fromkeys(id_ for id_, matches in rows if matches)
        if len(rows) < bite:
            return list(ids), 0, True
        last = rows[-1][0]
        if last in ids or rows[0][0] == last:
            return list(ids), last, False
        return list(ids), last + 1, False

    return look


def _bites(text: bytes, params: Mapping[str, Any]) -> Source:
    """The commands that a statement gives, newest first."""

    def look(before: int, bite: int) -> Steps[Found]:
        rows = yield Statement(text, {**params, "before_id": before, "bite": bite})
        return list(dict.fromkeys(id_ for (id_,) in rows)), rows[-1][0] if rows else 0, len(rows) < bite

    return look


def _named(command_id: str) -> Steps[list[int]]:
    domains = yield from all_domains()
    rows = yield Statement(
        b"SELECT id FROM commandbus.command "
        b"WHERE domain = ANY (%(domains)s::text[]) AND command_id = %(command_id)s",
        {"domains": domains, "command_id": command_id},
    )
    return [id_ for (id_,) in rows]


def _few_queued(domain: str | None) -> Steps[list[int] | None]:
    """The commands that wait in their queues; None if these are too many to list."""
    found: list[int] = []
    for name in [domain] if domain is not None else (yield from all_domains()):
        rows = yield from _of_queue("commands/find_queued", name, {"most": FEW + 1})
        found += [id_ for id_, is_held in rows if id_ is not None and not is_held]
        if len(rows) > FEW or len(found) > FEW:
            return None
    return found


def few_of_domain(domain: str) -> Steps[list[int] | None]:
    """All commands of a domain; None if these are too many to list."""
    rows = yield Statement(sql.text("commands/find_rare"), {"domain": domain, "most": FEW + 1})
    return None if len(rows) > FEW else [id_ for (id_,) in rows]


def held(domain: str | None) -> Steps[list[int]]:
    """The ids of commands that a worker holds."""
    found: list[int] = []
    for name in [domain] if domain is not None else (yield from all_domains()):
        params = {"domain": name, "most": MOST_HELD}
        rows = yield from _of_queue("commands/held_commands", name, params)
        found += [id_ for (id_,) in rows]
    return found


def _of_queue(name: str, domain: str, params: Mapping[str, Any]) -> Steps[list[Row]]:
    try:
        return (yield Statement(sql.text(name, domain=domain), params))
    except pg.UndefinedTable:
        raise (yield from no_queue(domain)) from None
