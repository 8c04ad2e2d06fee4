"""What a batch is, its states, and what is sent when it ends.

    create ──► PENDING ──► IN_PROGRESS ──► COMPLETED                  (every member COMPLETED)
                  │             │     └──► COMPLETED_WITH_FAILURES    (some FAILED or CANCELED)
                  └─── cancel ──┴────────► CANCELED

A batch ends when it is closed and every member has ended. A member in the troubleshooting queue keeps it
IN_PROGRESS until a person has decided. `on_complete` is a command or a reply, which is stored with the batch and
sent in the transaction that ends it. So it survives whatever is killed meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from uuid import UUID

from commandbus.errors import InvalidCommandError
from commandbus.model import names, payload
from commandbus.model.command import CancelRequest
from commandbus.model.durations import Duration
from commandbus.model.handle import Handle
from commandbus.model.json_values import Json, JsonValue
from commandbus.model.names import ADDRESSES
from commandbus.quick_dataclass import dataclass

RATE_WINDOW_SECONDS = 10.0  # as in commandbus.moving_rate
QUIET_SECONDS = 20.0
QUIET_GAPS = 3
MOST_LOOKED_AT = 200


class BatchStatus(StrEnum):
    """The status of a batch."""

    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    COMPLETED_WITH_FAILURES = "COMPLETED_WITH_FAILURES"
    CANCELED = "CANCELED"

    @property
    def is_final(self) -> bool:
        """Nothing moves a batch out of this state."""
        return self not in (BatchStatus.PENDING, BatchStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class OnComplete:
    """The command that is sent when a batch ends.

    Without `data` it gets the batch's summary (batch_id, status, counts, custom_data …), which is in its
    `headers["batch"]` in any case. Its correlation_id is the batch_id.
    """

    domain: str
    command_type: str
    data: JsonValue = None
    command_id: str | None = None


CompleteWhen = Literal["finished", "only_troubleshooting_left"]
"""When `on_complete` is sent: when the last member has ended, or when no member is left but those that need a
person."""
COMPLETE_WHEN: tuple[str, ...] = get_args(CompleteWhen)

WhenComplete: TypeAlias = "OnComplete | Mapping[str, object] | Callable[..., object]"
"""`on_complete=` takes an OnComplete, a dict with its fields, `{"reply_to": queue}`, or a registered handler."""


class _Receipt(NamedTuple):
    domain: str
    batch_id: str
    id: int
    total: int
    created: bool = True


class CreatedBatch(Handle, _Receipt):
    """The receipt of `create_batch`. `created` is False if the same batch had been created before."""

    def wait(self, wait: Duration | None = None) -> Any:
        """Wait until this batch is finished, and return its BatchRecord, as `bus.wait_for_batch` does. Await it if
        an AsyncCommandBus has created the batch."""
        return self._waiting_bus().wait_for_batch(self.domain, self.batch_id, wait=wait)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Everything that is known of a batch at the moment of asking.

    `running` is how many members somebody holds just now (0 when it is finished). `rate_per_second` is a moving
    average over some ten seconds of members that became final, and falls while nothing happens. `eta_seconds` is
    how long the rest takes, as far as that is known (`eta`); None if nobody can say. `on_complete` is `{"domain",
    "command_type", "data", "command_id"}` or `{"reply_to"}`. `retry_of` is the batch_id of the batch whose failed
    members were sent again in this one. `cancel` says who asked to cancel it.
    """

    id: int
    domain: str
    batch_id: str
    name: str | None
    holds: str
    status: BatchStatus
    is_open: bool
    total: int
    completed: int
    failed: int
    canceled: int
    in_tsq: int
    running: int
    rate_per_second: float
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    custom_data: Json = None
    on_complete: Mapping[str, Json] | None = None
    retry_of: str | None = None
    cancel: CancelRequest | None = None
    eta_seconds: float | None = None

    @property
    def is_finished(self) -> bool:
        """Has it ended?"""
        return self.finished_at is not None

    @property
    def finished(self) -> int:
        """How many members are final."""
        return self.completed + self.failed + self.canceled

    @property
    def remaining(self) -> int:
        """How many members are not final yet; those in the troubleshooting queue are among them."""
        return max(self.total - self.finished, 0)

    @property
    def progress(self) -> float:
        """From 0 to 1: how much of it is final."""
        if self.total == 0:
            return 1.0 if self.is_finished else 0.0
        return min(self.finished / self.total, 1.0)


@dataclass(frozen=True, slots=True)
class BatchCancelReport:
    """What `cancel_batch` did: how many members it canceled, and how many run and were asked to stop. `left`:
    another session has locked so many; a worker of the domain cancels them when they are free."""

    domain: str
    batch_id: str
    canceled: int
    requested: int
    left: int = 0


@dataclass(frozen=True, slots=True)
class BatchRetryReport:
    """What `retry_failed` did.

    `retried` left the troubleshooting queue; `sent_again` had FAILED for good and are the members of the new batch
    `new_batch_id` (None: there were none); `sent_before` had been sent again by an earlier call.
    """

    domain: str
    batch_id: str
    retried: int
    sent_again: int
    sent_before: int
    new_batch_id: str | None


def completion_of(value: object) -> dict[str, Any] | None:
    """What `on_complete=` asks for, checked, as it is stored; InvalidCommandError names what is wrong."""
    if value is None:
        return None
    if isinstance(value, OnComplete):
        found = {"domain": value.domain, "command_type": value.command_type, "data": value.data,
                 "command_id": value.command_id}  # fmt: skip
    elif isinstance(value, Mapping):
        found = dict(value)
    elif callable(value):
        domain, command_type = _address_of(value)
        found = {"domain": domain, "command_type": command_type}
    else:
        raise InvalidCommandError(
            f"on_complete {names.shown(value)} is not OnComplete(domain, command_type, data=, command_id=), "
            f'a dict of these, {{"domain": …, "command_type": …}}, {{"reply_to": queue}}, and a registered handler'
        )
    return _checked(found)


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    if "reply_to" in found:
        if len(found) > 1:
            others = ", ".join(sorted(str(key) for key in found if key != "reply_to"))
            raise InvalidCommandError(
                f"on_complete has reply_to and {others}: it is a reply or a command, not both"
            )
        return {"reply_to": names.check_queue(found["reply_to"])}
    known = ("domain", "command_type", "data", "command_id")
    if unknown := [key for key in found if key not in known]:
        raise InvalidCommandError(
            f"unknown field {names.shown(unknown[0])} of on_complete; known are {', '.join(known)}; or reply_to"
        )
    for name in ("domain", "command_type"):
        if found.get(name) is None:
            raise InvalidCommandError(f"on_complete has no {name}; it needs domain and command_type, or reply_to")
    command_id = found.get("command_id")
    if isinstance(command_id, UUID):
        command_id = str(command_id)
    return {
        "domain": names.check_domain(found["domain"]),
        "command_type": names.check_type(found["command_type"]),
        "data": found.get("data"),
        "command_id": None if command_id is None else names.check_id(command_id),
    }


def _address_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Which command a function is the handler of."""
    addresses: list[tuple[str, str]] = list(dict.fromkeys(getattr(function, ADDRESSES, ())))
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
    if not addresses:
        raise InvalidCommandError(
            f"on_complete: {name} is not a registered handler, so no worker could find it; register it with "
            f"HandlerRegistry (@handlers.handler(domain, command_type)), or give OnComplete(domain, command_type)"
        )
    if len(addresses) > 1:
        listed = ", ".join(f"{command_type!r} of domain {domain!r}" for domain, command_type in addresses)
        raise InvalidCommandError(
            f"on_complete: {name} is the handler of {len(addresses)} commands ({listed}); "
            f"choose one with OnComplete(domain, command_type)"
        )
    return addresses[0]


def dump_json(value: object, what: str, max_bytes: int) -> str | None:
    """JSON text of what is kept with a batch; None for None."""
    return None if value is None else payload.dump(value, what=what, max_bytes=max_bytes)


def rate_now(rate: float, seconds: float | None, count_then: int, count_now: int) -> float:
    """The moving average as of now, as commandbus.moving_rate says; `seconds` have passed since it was `rate`.

    Within the first second there is nothing to add: a few members divided by next to no time are no rate.
    """
    if seconds is None:
        return 0.0
    if seconds < 1:
        return rate if rate > 0 else float(count_now - count_then)
    weight = 1.0 if count_then == 0 else 1 - math.exp(-seconds / RATE_WINDOW_SECONDS)
    return rate + ((count_now - count_then) / seconds - rate) * weight


class BatchPace(NamedTuple):
    """How fast a batch moves: the rate when something last became final, how many seconds ago that was, and the
    moving average as of now. `seconds` is None if nothing has become final yet."""

    rate_then: float = 0.0
    seconds: float | None = None
    rate_now: float = 0.0

    @property
    def expected(self) -> float | None:
        """Members a second that may be expected; None if it stands still, or nothing was measured.

        Where a member takes minutes, some minutes without one are no standstill.
        """
        if self.seconds is None or self.seconds <= QUIET_SECONDS:
            return self.rate_now if self.rate_now > 0 else None
        is_usual = self.rate_then > 0 and self.seconds <= QUIET_GAPS / self.rate_then
        return self.rate_then if is_usual else None


class Waits(NamedTuple):
    """What some members of a batch wait for: how many are `running`, how many `could` run or need a person, how
    many are delayed and for how many seconds at most, and how many wait for limits. `limit_seconds` is how long
    the last of these waits for its turn; None if nobody can say."""

    running: int = 0
    could: int = 0
    delayed: int = 0
    delay_seconds: float = 0.0
    limited: int = 0
    limit_seconds: float | None = 0.0

    @property
    def known(self) -> int:
        """How many members wait for something whose end is known."""
        return self.delayed + (0 if self.limit_seconds is None else self.limited)


def eta(left: int, running: int, pace: BatchPace, waits: Waits) -> float | None:
    """How many seconds it takes until `left` members are final; None if nobody can say.

    While a batch moves, that is the rest at its pace, and no less than what some of it has to wait for. While it
    stands still, only what is known counts: if all of the rest waits for the end of a back-off or for its turn at
    a limit, then that. Of a large batch `MOST_LOOKED_AT` members speak for all.
    """
    if left <= 0:
        return None
    wait = max(waits.delay_seconds, waits.limit_seconds or 0.0)
    if pace.expected is not None:
        return max(left / pace.expected, wait)
    if running or waits.running or waits.could or waits.known < min(left, MOST_LOOKED_AT):
        return None
    if not waits.delayed:
        return waits.limit_seconds
    if pace.rate_then <= 0:
        return None  # their duration after a back-off was never measured
    return max(waits.delay_seconds + waits.delayed / pace.rate_then, waits.limit_seconds or 0.0)
