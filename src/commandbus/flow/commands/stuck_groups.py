"""Attempts that had to be stopped, by where in the application's own code they hung. Reads only, locks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.page import Page
from commandbus.quick_dataclass import dataclass

BUDGET = 5_000  # attempts that one call looks at


@dataclass(frozen=True, slots=True)
class StuckGroup:
    """Attempts of one command type that hung at the same place. `own_frame` is the innermost frame of the
    application's own code; None if none was seen. `rungs` says what stopped how many of them, and `command_id` is
    the command of the last one."""

    domain: str
    command_type: str
    own_frame: str | None
    count: int
    rungs: Mapping[str, int]
    first_at: datetime
    last_at: datetime
    command_id: str


@operation(atomic=False)
def list_stuck_groups(
    domain: str | None = None,
    command_type: str | None = None,
    *,
    since: datetime | None = None,
    limit: int = 50,
) -> Steps[Page[StuckGroup]]:
    """The groups among the newest 5,000 attempts that had to be stopped, the one that was seen last first. A page
    that has not seen all is partial."""
    if since is not None and (not isinstance(since, datetime) or since.tzinfo is None):
        raise InvalidCommandError(f"since must be a datetime with a time zone, not {names.shown(since)}")
    params = {
        "domain": None if domain is None else names.check_domain(domain),
        "command_type": None if command_type is None else names.check_type(command_type),
        "since": since,
        "budget": BUDGET,
    }
    rows = yield Statement(sql.text("commands/stuck_groups"), params)
    together: dict[tuple[str, str, str | None], list[Row]] = {}
    for row in rows:
        together.setdefault(row[:3], []).append(row)
    groups = sorted(map(_group, together.values()), key=lambda group: group.last_at, reverse=True)
    is_cut = len(groups) > names.check_count(limit, "limit") or any(row[-1] for row in rows)
    return Page(groups[:limit], is_partial=is_cut)


def _group(rows: list[Row]) -> StuckGroup:
    domain, command_type, own_frame, *_ = rows[0]
    last = max(rows, key=lambda row: row[6])
    return StuckGroup(
        domain,
        command_type,
        own_frame,
        sum(row[4] for row in rows),
        {row[3]: row[4] for row in sorted(rows, key=lambda row: (-row[4], row[3]))},
        min(row[5] for row in rows),
        last[6],
        last[7],
    )
