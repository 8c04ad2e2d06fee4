"""One limit in detail: who holds its permits and since when, who stands in its line and for how long, and its last
back-offs. Every list is bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from commandbus import sql
from commandbus.flow.limits.declare import LimitRow, get_limit
from commandbus.flow.limits.inspect import ControlAction, LimitInfo, estimate, list_actions, why_none
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.limit import PermitUsage
from commandbus.model.limit_state import caller_of
from commandbus.quick_dataclass import dataclass

MOST_IN_LINE: Final = 100
MOST_BACKOFFS: Final = 500
MOST_HOLDERS: Final = 200
MOST_ACTIONS: Final = 20

_NEVER: Final = datetime.max.replace(tzinfo=UTC)
_Command = tuple[str, str, str, int | None]  # domain, command_id, command_type, msg_id
_Running = tuple[str | None, datetime | None]  # worker, since


@dataclass(frozen=True, slots=True)
class PermitHolder:
    """Who holds a permit: a command in a worker, or a caller inside a program (then only `holder` is known).

    `since` is when the command was claimed, `lease_seconds` when its permit ends unless it is renewed.
    """

    holder: str
    lease_seconds: float
    domain: str | None = None
    command_id: str | None = None
    command_type: str | None = None
    worker: str | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class InLimitLine:
    """A command, or a caller inside a program (`command_id` is None, and `caller` names it), that waits for a
    permit. `ahead`: how many are before it. `seconds`: how long it will wait; None if there is no estimate."""

    ahead: int
    domain: str | None
    command_id: str | None
    command_type: str | None
    caller: str | None
    waits_since: datetime
    note: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class LimitBackoff:
    """A bad answer of an API that blocked its limit for some seconds. `answer` is rate_limited (a 429), broken (a
    5xx) or timeout. `breaker_open`: it opened the breaker."""

    at: datetime
    answer: str
    step: int
    seconds: float
    breaker_open: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class LimitDetail:
    """A limit, its holders, the beginning of its line, its last back-offs and changes, the last two newest
    first."""

    limit: LimitInfo
    holders: list[PermitHolder]
    line: list[InLimitLine]
    backoffs: list[LimitBackoff]
    actions: list[ControlAction]


@operation(atomic=False)
def limit_detail(info: LimitInfo) -> Steps[LimitDetail]:
    """The details of a limit whose state was just read."""
    row = yield from get_limit(info.name).steps
    holders = yield from _holders(info.holders)
    line = yield from _line(row, PermitUsage(info.holders, info.starts_per_second, info.mode, info.why_unknown))
    found = yield Statement(sql.text("limits/backoffs"), {"name": info.name, "most": MOST_BACKOFFS})
    actions = yield from list_actions(info.name, limit=MOST_ACTIONS).steps
    return LimitDetail(info, holders, line, [LimitBackoff(*event) for event in found], actions)


def _holders(tokens: Mapping[str, float]) -> Steps[list[PermitHolder]]:
    """Who holds these permits. A token names the row of its command; the queue says who runs that, since when."""
    kept = sorted(tokens.items(), key=lambda item: (item[1], item[0]))[:MOST_HOLDERS]
    ids = [int(caller) for token, _ in kept if (caller := caller_of(token)) != token]
    rows = (yield Statement(sql.text("limits/holding_commands"), {"ids": ids})) if ids else []
    commands: dict[int, _Command] = {id_: (*rest,) for id_, *rest in rows}
    running = yield from _running(list(commands.values()))
    found = []
    for token, seconds in kept:
        caller = caller_of(token)
        command = commands.get(int(caller)) if caller != token else None
        if command is None:
            found.append(PermitHolder(token, seconds))
            continue
        domain, command_id, command_type, msg_id = command
        worker, since = running.get((domain, msg_id), (None, None))
        found.append(PermitHolder(token, seconds, domain, command_id, command_type, worker, since))
    return sorted(found, key=lambda item: (item.since is None, item.since or _NEVER, item.holder))


def _running(commands: Sequence[_Command]) -> Steps[dict[tuple[str, int | None], _Running]]:
    by_domain: dict[str, list[int]] = {}
    for domain, _, _, msg_id in commands:
        if msg_id is not None:
            by_domain.setdefault(domain, []).append(msg_id)
    found: dict[tuple[str, int | None], _Running] = {}
    for domain, msg_ids in sorted(by_domain.items()):
        rows = yield Statement(sql.text("limits/holding_since", domain=domain), {"msg_ids": sorted(msg_ids)})
        found |= {(domain, msg_id): (worker, _moment(since)) for msg_id, worker, since in rows}
    return found


def _moment(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:  # another client may have written anything
        return None


def _line(row: LimitRow, usage: PermitUsage) -> Steps[list[InLimitLine]]:
    rows = yield Statement(sql.text("limits/line"), {"name": row.name, "most": MOST_IN_LINE})
    return [
        InLimitLine(
            ahead,
            domain or None,
            command_id,
            command_type if domain else None,
            None if domain else command_type,
            since,
            why_none(row) if domain else note,
            estimate(row, usage, ahead, is_waiting=True).seconds,
        )
        for ahead, (domain, command_id, command_type, since, note) in enumerate(rows)
    ]
