"""list_actions: who did what, when and why, newest first. Reads only, locks nothing.

What was done to commands is in one table. What was done to limits, breakers, pauses, schedules, key limits,
batches, plans and workers is in another. Both are walked backwards by their keys, and merged by time. One call
looks at BUDGET rows of each: a page that is not full then is partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.json_values import Json
from commandbus.model.page import MAX_ID, Page, no_cursor
from commandbus.model.payload import loads_or_none
from commandbus.quick_dataclass import dataclass

BUDGET: Final = 10_000
BITE: Final = 2_000
_OUT_OF_ORDER: Final = timedelta(hours=1)  # a longer transaction may be dated before its neighbors


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """What somebody did. `kind` is "command", or "control" for limits, breakers, pauses, schedules, key limits,
    batches, plans and workers.

    `operator` is "commandbus" if no person did it. `subject` says what it was done to: "orders ship-17", "limit
    docai", "breaker orders/ship", "pause orders/", "schedule orders/nightly", "key_limit orders/tenant", "batch
    orders/b7". `domain` is None for a limit, and for a command that was pruned.
    """

    kind: Literal["command", "control"]
    id: int
    performed_at: datetime
    operator: str
    action: str
    reason: str | None
    domain: str | None
    command_id: str | None
    command_type: str | None
    subject: str
    details: Json


class Position(NamedTuple):
    """How far both tables were read: everything before these ids is left."""

    command: int = MAX_ID
    control: int = MAX_ID

    def after(self, row: Row) -> Position:
        """The position when this row was looked at."""
        return self._replace(**{row[0]: row[1]})

    def __str__(self) -> str:
        return f"{self.command}.{self.control}"


@operation(atomic=False)
def list_actions(
    *,
    operator: str | None = None,
    action: str | None = None,
    domain: str | None = None,
    since: datetime | None = None,
    before: datetime | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Steps[Page[ActionRecord]]:
    """A page of what was done, newest first."""
    names.check_count(limit, "limit")
    filters = {
        "operator": None if operator is None else names.to_id(operator, "operator"),
        "action": None if action is None else names.to_id(action, "action").upper().replace("-", "_"),
        "domain": None if domain is None else names.check_domain(domain),
        "since": _instant(since, "since"),
        "before": _instant(before, "before"),
    }
    bite = max(BITE, limit + 1) if any(value is not None for value in filters.values()) else limit + 1
    found: list[Row] = []
    position, looked_at, is_end = _position(cursor), 0, False
    while looked_at < BUDGET and not is_end and len(found) <= limit:
        params = {**filters, "command_id": position.command, "control_id": position.control, "bite": bite}
        rows = yield Statement(sql.text("audit/list"), params)
        position, is_end = _take(rows, position, found, limit, bite, filters)
        looked_at += bite
    items = [_record(row) for row in found[:limit]]
    if len(found) > limit:
        return Page(items, str(position))
    return Page(items) if is_end else Page(items, str(position), is_partial=True)


def _take(
    rows: list[Row], position: Position, found: list[Row], limit: int, bite: int, filters: Mapping[str, Any]
) -> tuple[Position, bool]:
    """Merge a bite by time into `found`, until one more was found than the page has, which is not taken. Returns
    how far it came, and whether that is the end. Where a table has more rows than were read, the merge stops with
    the last that is known."""
    sides = {kind: [row for row in rows if row[0] == kind] for kind in ("command", "control")}
    is_cut = {kind: len(side) == bite for kind, side in sides.items()}
    for side in sides.values():
        side.sort(key=lambda row: row[1])  # the newest is last
    since = filters["since"]
    while any(sides.values()):
        kind = max((kind for kind in sides if sides[kind]), key=lambda kind: sides[kind][-1][2])
        row = sides[kind].pop()
        if row[-1]:
            found.append(row)
            if len(found) > limit:
                return position, False
        position = position.after(row)
        if since is not None and row[2] + _OUT_OF_ORDER < since:
            return position, True
        if is_cut[kind] and not sides[kind]:
            return position, False
    return position, True


def _record(row: Row) -> ActionRecord:
    *head, details, _ = row
    return ActionRecord(*(*head, loads_or_none(details) or None))


def _position(cursor: str | None) -> Position:
    if cursor is None:
        return Position()
    numbers = cursor.split(".") if isinstance(cursor, str) else []
    if len(numbers) == 2 and all(number.isascii() and number.isdigit() for number in numbers):
        made = Position(int(numbers[0][:20]), int(numbers[1][:20]))
        if max(made) <= MAX_ID:
            return made
    raise no_cursor(cursor)


def _instant(value: object, what: str) -> datetime | None:
    if value is None or (isinstance(value, datetime) and value.tzinfo is not None):
        return value
    raise InvalidCommandError(f"{what} must be a datetime with a time zone, not {names.shown(value)}")
