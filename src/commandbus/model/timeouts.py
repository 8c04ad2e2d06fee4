"""The hierarchy of timeouts, and its arithmetic.

Each layer must give up before the next outer one does. Otherwise the outer one cuts the inner one off, and nobody
can say why. `Timeouts` cannot be created in the wrong order: every rule is checked when it is created, and the
error names both settings with their values.

    started        deadline_at            stuck_at
       |  running       |      grace         |   stuck: fenced, settled, slot replaced
       |----------------|--------------------|------------------------------------->  monotonic seconds
       |deadline_seconds|    cancel_grace    |

    lease  |--- visibility_timeout ---|   renewed every third of it, grace included

Instants (`…_at`) are seconds of one monotonic clock, the caller's. Nothing here reads a clock, waits, or
talks to a server: the monitor, the supervisor and the pool ask, and act.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from enum import StrEnum
from typing import Final

from commandbus.model.durations import format_seconds, parse_seconds
from commandbus.quick_dataclass import dataclass

MONITOR_TICK: Final = 0.25
"""Seconds between two looks of the monitor: every limit is noticed at most this much late."""

STUCK_MARGIN: Final = 5.0
"""An attempt without a task_timeout counts as stuck at visibility_timeout + this."""

FROZEN_MARGIN: Final = 0.5
"""How long after a slot's stuck_at the supervisor waits for the worker itself to act before it kills it."""

SHUTDOWN_MARGIN: Final = 2.0
"""What a shutdown keeps in reserve after the grace: to settle, report and exit."""

LOCK_SHARE: Final = 0.8
"""lock_timeout as a share of statement_timeout: a wait for a lock is then told from a slow query."""

MIGRATION_WAIT_SECONDS: Final = 300.0
"""How long a migration waits for locks and for others that migrate, in all."""

SHORTEST: Final = 0.001
"""One millisecond: to PostgreSQL a limit of 0 means none at all."""

_WHY_NOT_ZERO: Final = {
    "statement_timeout": "to the server 0 means no limit at all",
    "pool_timeout": "with 0 no attempt would ever wait for a connection",
}
_BEATS_BEFORE_DEATH: Final = 10
_LONGEST_SERVER_LIMIT_MS: Final = 2_147_483_647


class TimeoutOrderError(ValueError):
    """Two timeouts contradict each other; `settings` names them."""

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


class Phase(StrEnum):
    """Where an attempt stands on the clock."""

    RUNNING = "running"
    GRACE = "grace"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a handler's connection is told, in the server's unit; none of them is ever 0."""

    statement_timeout_ms: int
    lock_timeout_ms: int
    idle_in_transaction_session_timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every limit in seconds; the names are those of the settings.

    `task_timeout` has three meanings: None is the default deadline, 0 no deadline at all, N a deadline of N.
    """

    statement_timeout: float = 25.0
    pool_timeout: float = 30.0
    visibility_timeout: float = 30.0
    task_timeout: float | None = None
    cancel_grace: float = 10.0
    heartbeat_timeout: float = 15.0
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "task_timeout":
                object.__setattr__(self, field.name, parse_seconds(value, name=field.name))
        self.check()

    # --- the attempt -------------------------------------------------------------------------------------

    def deadline_seconds(self, *task_timeouts: float | None) -> float | None:
        """How long an attempt may run before it is asked to stop; None for no limit.

        `task_timeouts` are what the command and the handler ask for, the most specific first; None means
        that it asks for nothing, and the worker's own `task_timeout` is the last to be asked.
        """
        chosen = next((asked for asked in (*task_timeouts, self.task_timeout) if asked is not None), None)
        if chosen is None:
            return self.visibility_timeout + STUCK_MARGIN - self.cancel_grace
        return chosen or None

    def stuck_seconds(self, *task_timeouts: float | None) -> float | None:
        """How long after its start an attempt counts as stuck; None for never."""
        return self.stuck_at(self.deadline_seconds(*task_timeouts))

    def deadline_at(self, started_at: float, *task_timeouts: float | None) -> float | None:
        seconds = self.deadline_seconds(*task_timeouts)
        return None if seconds is None else started_at + seconds

    def stuck_at(self, deadline_at: float | None) -> float | None:
        return None if deadline_at is None else deadline_at + self.cancel_grace

    def phase(self, now: float, *, deadline_at: float | None) -> Phase:
        """RUNNING before the deadline, GRACE from it on, STUCK from the end of the grace on."""
        stuck_at = self.stuck_at(deadline_at)
        if deadline_at is None or stuck_at is None or now < deadline_at:
            return Phase.RUNNING
        return Phase.GRACE if now < stuck_at else Phase.STUCK

    # --- its connections ---------------------------------------------------------------------------------

    @property
    def lock_timeout(self) -> float:
        return self.statement_timeout * LOCK_SHARE

    def session_limits(self, until_stuck_seconds: float | None) -> SessionLimits:
        """The server's limits for a connection handed out now, clipped to what remains until stuck."""
        statement = _clipped(self.statement_timeout, until_stuck_seconds)
        return SessionLimits(
            statement_timeout_ms=to_milliseconds(statement),
            lock_timeout_ms=to_milliseconds(statement * LOCK_SHARE),
            idle_in_transaction_session_timeout_ms=to_milliseconds(statement),
        )

    def pool_wait(self, remaining_seconds: float | None) -> float:
        """How long to wait for a pool connection: never more than what remains of the attempt."""
        return _clipped(self.pool_timeout, remaining_seconds)

    # --- its lease ---------------------------------------------------------------------------------------

    @property
    def renewal_interval(self) -> float:
        return self.visibility_timeout / 3

    @property
    def late_seconds(self) -> float:
        """The age at which a lease that was not renewed counts as late. From then on nothing is started under it,
        and what runs under it is asked to stop, so that it is gone when the lease ends.

        The age counts from when the claim or the last good renewal was *sent*, so the server's lease never ends
        first. A renewal that is merely slow has two thirds of the lease, even if that shortens the grace.
        """
        third = self.renewal_interval
        late = max(self.visibility_timeout - self.cancel_grace, 2 * third, third + 2 * MONITOR_TICK)
        return min(late, self.visibility_timeout)

    # --- its worker --------------------------------------------------------------------------------------

    def kill_at(self, beat_at: float, stuck_ats: Iterable[float]) -> float:
        """When the supervisor kills a worker that has not beaten since `beat_at`.

        `stuck_ats` are those of its slots. A handler that holds the GIL must not get more time than one that
        sleeps, so the first of them counts too; not one before the last beat, though: the worker's own
        monitor was alive to act on that.
        """
        unseen = (stuck_at + FROZEN_MARGIN for stuck_at in stuck_ats if stuck_at > beat_at)
        return min(beat_at + self.heartbeat_timeout, min(unseen, default=math.inf))

    @property
    def drain_seconds(self) -> float:
        """How long a shutdown lets attempts run on before it cancels them."""
        return max(0.0, self.shutdown_timeout - self.cancel_grace - SHUTDOWN_MARGIN)

    # --- the rules ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `TimeoutOrderError` for the first rule that does not hold."""
        self._check_floors()
        if not self.statement_timeout < self.visibility_timeout:
            raise self._misordered("statement_timeout", "visibility_timeout")
        if not self.cancel_grace < self.visibility_timeout + STUCK_MARGIN:
            raise self._misordered("cancel_grace", "visibility_timeout", plus=STUCK_MARGIN)
        if not self.cancel_grace < self.shutdown_timeout:
            raise self._misordered("cancel_grace", "shutdown_timeout")

    def doubts(self) -> tuple[str, ...]:
        """Values that are allowed but probably not intended, one sentence each."""
        return tuple(self._doubts())

    def _check_floors(self) -> None:
        for name, why in _WHY_NOT_ZERO.items():
            if getattr(self, name) < SHORTEST:
                raise TimeoutOrderError(f"{self._named(name)} must be at least 1ms: {why}", name)
        if not self.renewal_interval + MONITOR_TICK < self.visibility_timeout:
            raise TimeoutOrderError(
                f"{self._named('visibility_timeout')} is too short: a lease is renewed after a third of it, "
                f"seen up to {format_seconds(MONITOR_TICK)} late, and would end before that; "
                f"it must be more than {format_seconds(MONITOR_TICK * 1.5)}",
                "visibility_timeout",
            )
        shortest_heartbeat = MONITOR_TICK * _BEATS_BEFORE_DEATH
        if not self.heartbeat_timeout > shortest_heartbeat:
            raise TimeoutOrderError(
                f"{self._named('heartbeat_timeout')} must be more than {format_seconds(shortest_heartbeat)}, "
                f"{_BEATS_BEFORE_DEATH} ticks of the monitor: a busy worker would be taken for a frozen one",
                "heartbeat_timeout",
            )

    def _misordered(self, lower: str, upper: str, *, plus: float = 0.0) -> TimeoutOrderError:
        limit = f"{self._named(upper)}" + (f" + {format_seconds(plus)}" if plus else "")
        value: float = getattr(self, lower)
        guess = f"; {_guess(value)}" if value >= 1000 else ""
        return TimeoutOrderError(f"{self._named(lower)} must be less than {limit}{guess}", lower, upper)

    def _doubts(self) -> Iterator[str]:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and _looks_like_milliseconds(value):
                yield f"{self._named(field.name)}: {_guess(value)}"
        if self.renewal_interval + self.heartbeat_timeout >= self.visibility_timeout:
            yield (
                f"a third of {self._named('visibility_timeout')} + {self._named('heartbeat_timeout')} is not "
                f"less than visibility_timeout: the leases of a frozen worker can end before it is killed"
            )
        if self.drain_seconds == 0:
            yield (
                f"{self._named('shutdown_timeout')} leaves no time beside {self._named('cancel_grace')} and "
                f"{format_seconds(SHUTDOWN_MARGIN)} to finish: running attempts are canceled at once"
            )

    def _named(self, name: str) -> str:
        value: float = getattr(self, name)
        plain, readable = _in_seconds(value), format_seconds(value)
        return f"{name} ({plain})" if value < 60 else f"{name} ({plain} = {readable})"


def to_milliseconds(seconds: float) -> int:
    """For the server: at least 1 (0 would switch the limit off), at most what it can hold."""
    return min(max(1, int(seconds * 1000)), _LONGEST_SERVER_LIMIT_MS)


def earliest(*deadlines: float | None) -> float | None:
    """The first of several deadlines, None being no deadline: a nested context can only shorten."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def _clipped(limit: float, remaining_seconds: float | None) -> float:
    return limit if remaining_seconds is None else max(SHORTEST, min(limit, remaining_seconds))


def _looks_like_milliseconds(value: float) -> bool:
    """Whole thousands from 5000 on which are not whole hours: 25000 and 30000, but not 7200 or 36000."""
    return value >= 5000 and value % 1000 == 0 and value % 3600 != 0


def _guess(value: float) -> str:
    return f"{value:.15g} looks like milliseconds: did you mean {format_seconds(value / 1000)}?"


def _in_seconds(value: float) -> str:
    return f"{value:.15g}s" if value >= 1 or value == 0 else format_seconds(value)
