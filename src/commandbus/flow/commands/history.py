"""Attempts that did not simply complete, and why, with tracebacks and autopsies.

`list_attempts` returns those of one command; the audit trail (`inspect.get_audit_trail`) is its short form.
`list_stuck` returns the attempts of all commands that had to be stopped. Reads only, locks nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.json_values import Json
from commandbus.model.page import Page, cut, id_of, no_cursor
from commandbus.model.payload import loads_or_none
from commandbus.quick_dataclass import dataclass

BUDGET = 10_000  # stopped attempts that one call looks at


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt; `verdict` is what `model/outcome.py` calls it. `number` counts all attempts of the command.

    `rung` says what stopped it, and `autopsy` what was seen then: its stacks, and what its database session did.
    `fingerprint` and `own_frame` say which failure it is (`bus.list_failures`), and `code_version` which code
    failed, if its worker is still known.
    """

    number: int
    verdict: str
    started_at: datetime | None
    finished_at: datetime
    retry_at: datetime | None
    worker: str | None
    error_type: str | None
    error_code: str | None
    error: str | None
    details: Json
    traceback: str | None
    rung: str | None
    duration_ms: int | None = None
    autopsy: Json = None
    fingerprint: str | None = None
    own_frame: str | None = None
    code_version: str | None = None


@dataclass(frozen=True, slots=True)
class StuckAttempt:
    """An attempt that had to be stopped, and its command; `id` is the command's internal id."""

    id: int
    domain: str
    command_id: str
    command_type: str
    number: int
    verdict: str
    rung: str
    error_type: str | None
    error_code: str | None
    error: str | None
    worker: str | None
    started_at: datetime | None
    finished_at: datetime
    duration_ms: int | None
    autopsy: Json


@operation(atomic=False)
def list_attempts(domain: str, command_id: str) -> Steps[list[AttemptRecord]]:
    """Failed, lost and returned attempts in order; empty if there were none, or no such command."""
    names.check_domain(domain)
    rows = yield Statement(
        sql.text("commands/list_attempts"), {"domain": domain, "command_id": names.to_id(command_id)}
    )
    return [
        AttemptRecord(*(*head, loads_or_none(details), trace, rung, duration_ms, loads_or_none(autopsy), *alike))
        for *head, details, trace, rung, duration_ms, autopsy, alike in ((*row[:-3], row[-3:]) for row in rows)
    ]


@operation(atomic=False)
def list_stuck(
    domain: str | None = None,
    command_type: str | None = None,
    *,
    since: datetime | None = None,
    limit: int = 50,
    cursor: str | None = None,
    everything: bool = True,
) -> Steps[Page[StuckAttempt]]:
    """Returns attempts that had to be stopped, newest first.

    Without `everything`, leaves out attempts that were waived (a bystander, a shutdown, a lost lease), and those
    that stopped within their grace when an operator canceled them.
    """
    if since is not None and (not isinstance(since, datetime) or since.tzinfo is None):
        raise InvalidCommandError(f"since must be a datetime with a time zone, not {names.shown(since)}")
    names.check_count(limit, "limit")
    start, end = _before(cursor), None
    if domain is not None or command_type is not None or not everything:
        found = yield Statement(
            b"SELECT finished_at FROM commandbus.attempt "
            b"WHERE rung IS NOT NULL AND finished_at <= COALESCE(%(before)s::timestamptz, 'infinity') "
            b"ORDER BY finished_at DESC OFFSET %(budget)s LIMIT 1",
            {"before": start["before"], "budget": BUDGET - 1},
        )
        end = found[0][0] if found else None
    rows = yield Statement(
        sql.text("commands/list_stuck", after="" if end is None else "AND a.finished_at >= %(after)s"),
        {
            "domain": None if domain is None else names.check_domain(domain),
            "command_type": None if command_type is None else names.check_type(command_type),
            "since": since,
            "everything": everything,
            "limit": limit + 1,
            "after": end,
        }
        | start,
    )
    if end is not None and len(rows) <= limit and (since is None or end >= since):
        stuck = [StuckAttempt(*(*head, loads_or_none(autopsy))) for *head, autopsy in rows]
        return Page(stuck, f"{end.isoformat()}|1|1|A", is_partial=True)
    return cut([StuckAttempt(*(*head, loads_or_none(autopsy))) for *head, autopsy in rows], limit, _cursor_of)


def _cursor_of(item: StuckAttempt) -> str:
    return f"{item.finished_at.isoformat()}|{item.id}|{item.number}|{item.verdict}"


def _before(cursor: str | None) -> dict[str, Any]:
    """Where the next page begins: at the attempt that a cursor names."""
    if cursor is None:
        return dict.fromkeys(("before", "before_command", "before_number", "before_verdict"))
    try:
        before, command, number, verdict = cursor.split("|")
        return {
            "before": datetime.fromisoformat(before),
            "before_command": id_of(command),
            "before_number": id_of(number),
            "before_verdict": verdict,
        }
    except (AttributeError, ValueError):
        raise no_cursor(cursor) from None
