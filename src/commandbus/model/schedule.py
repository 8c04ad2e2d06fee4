"""Schedule: what is sent, and when; and which firings of it are due. Pure: the instant `now` is the server's.

`decide` is asked when a schedule is due. It knows all instants that were not dealt with, what became of the last
command, and both policies:

- `missed`: of firings that nobody could make in time, `run_once` makes the newest, `run_all` makes all up to
  `most` (the newest ones), `skip` makes none. A firing counts as missed after LATE (a minute), or when the next
  one is due.
- `overlap`: while the last command is unfinished, `allow` fires all the same, `skip` leaves the firing out,
  `queue` lets it wait. A command in the troubleshooting queue counts as finished, because nothing but a person
  moves it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple, get_args

from commandbus.errors import InvalidScheduleError
from commandbus.model import envelope, names, payload
from commandbus.model.command import NewCommand
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import Json, JsonValue
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted
from commandbus.model.schedule_times import ScheduleTimes
from commandbus.quick_dataclass import dataclass

MissedPolicy = Literal["skip", "run_once", "run_all"]
OverlapPolicy = Literal["allow", "skip", "queue"]

LATE: Final = timedelta(minutes=1)
"""A firing that is later than this is missed."""
WAIT: Final = timedelta(seconds=1)
"""How often a firing that waits for the last command looks whether that has finished."""
MOST: Final = 1000
COUNTED: Final = 10
"""So many firings that are left out are counted for people: to count all that years have left would take long."""
HEADERS: Final = ("schedule", "scheduled_for")
"""What each command's headers say besides: the schedule's name, and the firing's instant."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A command that is sent again and again, at times that `cron` (in `timezone`, default UTC) or `every` names.

    `command_type` is the schedule's own name unless given. `data`, `headers`, `correlation_id`, `reply_to`,
    `max_attempts`, `timeout`, `expires`, `on_exhausted` and `priority` are those of each command. `missed` and
    `overlap`: see `commandbus.model.schedule`; `most` is how many missed firings `run_all` makes.
    """

    domain: str
    name: str
    cron: str | None = None
    every: Duration | None = None
    timezone: str | None = None
    command_type: str | None = None
    data: JsonValue = None
    headers: Mapping[str, JsonValue] | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    max_attempts: int | None = None
    timeout: Duration | None = None
    expires: Duration | None = None
    on_exhausted: OnExhausted | None = None
    missed: MissedPolicy = "run_once"
    overlap: OverlapPolicy = "allow"
    most: int = 100
    priority: Priority | None = None

    def __post_init__(self) -> None:
        names.check_domain(self.domain)
        check_name(self.name)
        times = ScheduleTimes.make(self.cron, self.every, self.timezone)
        if self.headers is not None and not isinstance(self.headers, Mapping):
            raise InvalidScheduleError(
                f"headers must be an object of names and values, not {names.shown(self.headers)}"
            )
        new = NewCommand(
            self.name if self.command_type is None else self.command_type,
            correlation_id=self.correlation_id,
            reply_to=self.reply_to,
            max_attempts=self.max_attempts,
            headers=None if self.headers is None else dict(self.headers),
            timeout=self.timeout,
            on_exhausted=self.on_exhausted,
            priority=self.priority,
        )
        envelope.check(new)
        if taken := [name for name in HEADERS if name in (new.headers or ())]:
            raise InvalidScheduleError(
                f"headers has the key {taken[0]!r}, which each firing sets; use another name for it"
            )
        payload.dump(self.data, what="data")
        payload.dump(new.headers, what="headers")
        _check_policies(self)
        for name, value in {
            "cron": times.cron,
            "every": times.every,
            "timezone": times.timezone,
            "command_type": new.command_type,
            "timeout": envelope.timeout_seconds(self.timeout),
            "expires": _expiry(self.expires),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def times(self) -> ScheduleTimes:
        """When it fires."""
        seconds = self.every if self.every is None else float(self.every)  # type: ignore[arg-type] # since it was made
        return ScheduleTimes(self.cron, seconds, self.timezone or "UTC")

    def next_firings(self, count: int = 5, *, after: datetime | None = None) -> list[datetime]:
        """The next firings in UTC, after now (by this computer's clock) or after an instant."""
        if after is None:
            after = datetime.now(UTC)
        elif not isinstance(after, datetime) or after.tzinfo is None:
            raise InvalidScheduleError(f"after must be a datetime with a time zone, not {names.shown(after)}")
        return self.times.first_after(after, names.check_count(count, "count", most=MOST))

    def definition(self) -> dict[str, Json]:
        """Everything but its place, ready for JSON; `Schedule(domain, name, **definition)` is the same again. What
        has its default is left out, so that an option which a later release adds changes no fingerprint."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)[2:]}
        given = {name: value for name, (value, default) in values.items() if value != default}
        if self.every is not None:
            del given["timezone"]
        return given

    def fingerprint(self) -> str:
        """Two schedules with the same fingerprint are the same. The order of keys in data is no difference."""
        text = payload.dump(self.definition(), what="schedule", max_bytes=payload.COMPOSED)
        ordered = json.dumps(payload.loads(text), sort_keys=True)
        return hashlib.sha256(ordered.encode()).hexdigest()[:32]


def check_name(name: object) -> str:
    """Return the name of a schedule, or say what is wrong with it."""
    if isinstance(name, str) and _NAME.match(name):
        return name
    raise InvalidScheduleError(
        f"schedule name {names.shown(name)} is not valid: use at most 100 letters, digits and any of _ . -, and "
        f"begin with a letter or digit"
    )


def _expiry(expires: Duration | None) -> float | None:
    if expires is None:
        return None
    seconds = parse_seconds(expires, name="expires", error=InvalidScheduleError)
    if not seconds:
        raise InvalidScheduleError(
            f"expires: {names.shown(expires)} leaves no time to start; give a second or more"
        )
    return seconds


def _check_policies(schedule: Schedule) -> None:
    for name, known in {"missed": get_args(MissedPolicy), "overlap": get_args(OverlapPolicy)}.items():
        if (value := getattr(schedule, name)) not in known:
            options = ", ".join(f'"{item}"' for item in known)
            raise InvalidScheduleError(f"{name} must be one of {options}, not {names.shown(value)}")
    if schedule.missed == "run_all" and schedule.overlap == "skip":
        raise InvalidScheduleError(
            'missed="run_all" and overlap="skip" contradict each other: of missed firings all but the first would '
            'overlap with it; give overlap="queue" or "allow"'
        )
    try:
        names.check_count(schedule.most, "most", most=MOST)
    except ValueError as error:
        raise InvalidScheduleError(str(error)) from None


class Due(NamedTuple):
    """A schedule that is due. All instants up to `passed_at` are dealt with; `now` is the server's clock."""

    times: ScheduleTimes
    missed: str
    overlap: str
    most: int
    passed_at: datetime
    now: datetime
    waiting_since: datetime | None = None  # since when a firing waits for the last command
    last_status: str | None = None  # of the last command; None if there is none, or it was pruned


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a due schedule. `firings` are sent. `next_at` is when to look again."""

    firings: tuple[datetime, ...]
    passed_at: datetime
    next_at: datetime | None
    waiting_since: datetime | None = None
    skipped: int = 0
    note: str | None = None  # for people; None if all went as usual
    warns: bool = False


def decide(due: Due) -> Decision:
    """Which firings of a due schedule are made, and when to look again."""
    most = max(due.most, COUNTED) if due.missed == "run_all" else COUNTED
    found = due.times.newest(due.passed_at, due.now, most + 1)
    following = due.times.next_after(due.now)
    if not found:
        return Decision((), due.passed_at, following, due.waiting_since)
    is_unfinished = due.overlap != "allow" and due.last_status == "PENDING"
    if is_unfinished and due.overlap == "queue":
        note = "the firing waits: the last command is unfinished"
        return Decision((), due.passed_at, due.now + WAIT, due.waiting_since or due.now, note=note)
    if is_unfinished:
        note = f"{_counted(found, most)} skipped: the last command is unfinished"
        return Decision((), found[-1], following, skipped=len(found), note=note)
    decision = _fire(due, found, following, most)
    if due.overlap != "allow" and due.last_status == "IN_TROUBLESHOOTING_QUEUE":
        note = "fired, although the last command is in the troubleshooting queue"
        return replace(decision, note=f"{decision.note}; {note}" if decision.note else note, warns=True)
    return decision


def _fire(due: Due, found: list[datetime], following: datetime | None, most: int) -> Decision:
    is_late = due.now - found[-1] >= LATE and due.waiting_since is None
    match due.missed:
        case "run_all":
            chosen = found[-due.most :]
        case "skip" if is_late:
            chosen = []
        case _:
            chosen = found[-1:]
    left_out = found[: len(found) - len(chosen)]
    note = f"{_counted(left_out, most - len(chosen))} missed" if left_out else None
    if due.overlap == "queue" and len(chosen) > 1:  # one after the other
        return Decision((chosen[0],), chosen[0], due.now + WAIT, due.waiting_since or due.now, note=note)
    return Decision(tuple(chosen), found[-1], following, note=note)


def _counted(found: list[datetime], most: int) -> str:
    """Firings that are left out; of more than `most`, nobody has counted the rest."""
    last = text_of(found[-1])
    if len(found) == 1:
        return f"the firing of {last} was"
    if len(found) > most:
        return f"more than {most} firings up to {last} were"
    return f"{len(found)} firings from {text_of(found[0])} to {last} were"


def text_of(instant: datetime) -> str:
    """An instant as the ids of commands have it: 2026-03-29T01:00:00Z, with a fraction if there is one."""
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


def command_id_of(name: str, instant: datetime) -> str:
    """The id of the command of a firing: it names schedule and instant, so no firing can be made twice."""
    return f"schedule:{name}@{text_of(instant)}"
