"""Requests to a limit client, and its replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Final, NamedTuple

from commandbus.clock import boottime, monotonic
from commandbus.errors import CommandBusError, LimitTimeoutError, UnknownLimitError
from commandbus.flow.limits.declare import LimitRow
from commandbus.flow.limits.inspect import full, why_none
from commandbus.flow.limits.permits import Turn
from commandbus.model.durations import format_seconds
from commandbus.model.limit_state import ApiAnswer
from commandbus.quick_dataclass import dataclass

EARLY: Final = 0.1
MOST_EARLY_SECONDS: Final = 5.0
"""How early a permit ends, as a part of its lease and in seconds. So its holder has stopped before another
begins."""


class Permit:
    """A permit of a limit that is held in this program. `taken_at` is monotonic. `renewed_at` (of
    `clock.boottime`) is the moment just before its last renewal was requested, so that it never ends later here
    than in the permit store."""

    __slots__ = (
        "call_timeout",
        "holder",
        "is_left",
        "is_lost",
        "lease",
        "limit",
        "on_lost",
        "renewed_at",
        "taken_at",
        "token",
    )

    def __init__(
        self,
        limit: str,
        token: str,
        lease: float,
        *,
        holder: str,
        call_timeout: float | None = None,
        on_lost: Callable[[Permit], None] | None = None,
        asked_at: float | None = None,
    ) -> None:
        self.limit = limit
        self.token = token
        self.lease = lease
        self.call_timeout = call_timeout  # of the limit, for a block that names none; None: no timeout
        self.holder = holder
        self.on_lost = on_lost
        self.is_lost = False
        self.is_left = False  # was it released together with its abandoned attempt?
        self.taken_at = monotonic()
        self.renewed_at = boottime() if asked_at is None else asked_at

    @property
    def ends_at(self) -> float:
        """When (of `clock.boottime`) it counts as lost unless it is renewed: a little before its lease ends."""
        return self.renewed_at + self.lease - min(self.lease * EARLY, MOST_EARLY_SECONDS)

    @property
    def is_sure(self) -> bool:
        """Is it certainly still held? A working limit client renews it after a third of its lease."""
        return not self.is_lost and boottime() - self.renewed_at < self.lease * 2 / 3

    def __repr__(self) -> str:
        return f"Permit({self.limit!r}, {self.token!r})"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a command cannot begin now. `until`: epoch second by the database's clock, if that is known."""

    limit: str
    code: str
    note: str
    until: float | None
    gives_up: bool = False


def refuse(row: LimitRow, *, waited_seconds: float | None) -> Refusal:
    """Says why a limit has no permit for a command now."""
    limit_state, now, name = row.limit_state, row.now, row.name
    max_wait = row.limit.max_wait_seconds
    until = limit_state.blocked_until(now)
    if until is not None or limit_state.is_probing:
        code = "LIMIT_BREAKER" if limit_state.breaker_open or limit_state.breaker_forced else "LIMIT_BACKOFF"
        note = why_none(row)
        if limit_state.breaker_forced:
            until = None
    else:
        code, note = "LIMIT_FULL", full(row)
    waited = row.waited_in_vain(waited_seconds)
    gives_up = max_wait is not None and waited >= max_wait
    if gives_up:
        code = "LIMIT_WAIT" if code == "LIMIT_FULL" else "RATE_LIMITED"
        note = f"{too_long(row, waited)}: {limit_state.explain(name) if code == 'RATE_LIMITED' else full(row)}"
    return Refusal(name, code, note, until, gives_up=gives_up)


def too_long(row: LimitRow, waited: float) -> str:
    """Says that a command has waited for a limit as long as it may."""
    return (
        f"has waited {format_seconds(round(waited, 1))} for limit {row.name} without a successful call of anybody,"
        f" and max_wait is {format_seconds(row.limit.max_wait_seconds or 0.0)}"
    )


def no_such(name: str, error: CommandBusError) -> Refusal:
    """A limit that is no longer declared, or cannot be used now or by this program (then another worker may)."""
    is_gone = isinstance(error, UnknownLimitError)
    return Refusal(name, "LIMIT_UNKNOWN" if is_gone else "LIMIT_BACKEND", str(error), None, gives_up=is_gone)


def waited_in_vain(name: str, wait: float, why: str | None = None) -> LimitTimeoutError:
    """The error of a caller that has waited too long for a permit, and what was in the way, if that is known."""
    text = f"no permit of limit {name!r} became free within {format_seconds(round(wait, 3))}"
    return LimitTimeoutError(f"{text}: {why}" if why else f"{text}; see `commandbus limits`", limit=name)


class QueuedCommand(NamedTuple):
    """A command and its queue row. A permit may be reserved for it."""

    domain: str
    msg_id: int
    id: int
    attempt_base: int

    @property
    def key(self) -> tuple[int, int, int]:
        """The key under which its turn is found."""
        return self.msg_id, self.id, self.attempt_base


@dataclass(slots=True, eq=False)
class PermitRequest:
    """A claimed command whose handler needs permits of some limits; exactly one of two replies follows."""

    command: QueuedCommand
    is_known: bool  # it was claimed before, so a permit may be reserved for it
    names: Sequence[str]
    holder: str
    on_granted: Callable[[list[Permit]], None]
    on_refused: Callable[[Refusal], None]
    on_lost: Callable[[Permit], None]
    payload: object = None  # any value of the caller, returned unchanged


@dataclass(slots=True, eq=False)
class PermitCall:
    """A caller inside a program that waits for a permit."""

    name: str
    token: str
    number: int
    until: float  # monotonic
    wait: float
    holder: str
    answer: Future[Permit]
    on_lost: Callable[[Permit], None] | None
    command: QueuedCommand | None = None
    since: datetime | None = None
    caller: int | None = None  # the id of the command whose handler asks
    is_in_line: bool = False
    on_forgotten: Callable[[], None] | None = None  # called instead of releasing the permit
    on_given_up: Callable[[Permit], object] | None = None  # called in addition to releasing the permit


@dataclass(slots=True, eq=False)
class Release:
    """The release of a permit, and how the call ended. `keeps`: the API may still be working on the call, so the
    permit stays taken until its lease ends. `stays`: the permit is used further, and only the end of the call is
    reported. `has_begun`: False if no call was made with it."""

    permit: Permit
    answer: ApiAnswer
    reason: str = ""
    retry_after: float | None = None
    keeps: bool = False
    stays: bool = False
    has_begun: bool = True
    then: Callable[[Release], None] | None = None
    # Set by the limit client: the call was a probe and failed while others waited, so its command is not charged.
    is_waived: bool = False


@dataclass(slots=True, eq=False)
class Limited:
    """A command whose call failed. `then` gets the state of the limit (None: it is gone) and what is known about
    the command, and returns whether the command will be parked."""

    limit: str
    command: QueuedCommand
    is_known: bool
    then: Callable[[LimitRow | None, Turn | None], bool]
    releases: Sequence[Release] = ()  # its permits
    untold: tuple[str, str, float | None] | None = None  # a refusal without a permit: holder, reason, retry after
