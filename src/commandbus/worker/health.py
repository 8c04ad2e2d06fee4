"""How well a worker is doing, from what its parts report.

    HEALTHY    no trouble
    DEGRADED   it works, but attempt after attempt fails, or there is a named reason (`set_degraded`)
    CRITICAL   slots get stuck, connections run out, or there is a named reason (`set_critical`)

Failures, stuck threads and exhaustions count for five minutes, so such a state ends by itself. A named reason
(`set_critical("database_unreachable")`, `set_degraded("limits_degraded")`) does not: the part that set it clears
it. A thread that asks for the health also looks whether the worker's own threads move (`watch_threads`): no thread
that has stopped can hide that. Errors about a command (`BusinessRuleException`, `PermanentCommandError`) say
nothing about the worker, and are not counted.

Invariant: memory is bounded and `record_success` costs about a microsecond, whatever happens. Nothing here acts;
`worker/watchdog.py` and the supervisor do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import ClassVar, Final

from commandbus.clock import monotonic
from commandbus.errors import BusinessRuleException, PermanentCommandError
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.json_values import Json

_NOT_THE_WORKERS: Final = (BusinessRuleException, PermanentCommandError)
_LONGEST_ERROR: Final = 200


class HealthState(StrEnum):
    """The state of a worker. The value is used by health checks and the registry."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    CRITICAL = "critical"


class HealthStatus:
    """The health of one run of a worker; safe to use from any thread.

    `clock` is monotonic, in seconds. A threshold is the count from which on a window says something. A subclass
    may have others as its attributes.
    """

    WINDOW_SECONDS: ClassVar[float] = 300.0
    FAILURE_THRESHOLD: ClassVar[int] = 10
    STUCK_THRESHOLD: ClassVar[int] = 3
    EXHAUSTION_THRESHOLD: ClassVar[int] = 5

    def __init__(
        self,
        *,
        failure_threshold: int | None = None,
        stuck_threshold: int | None = None,
        exhaustion_threshold: int | None = None,
        window: Duration | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        failure_threshold = self.FAILURE_THRESHOLD if failure_threshold is None else failure_threshold
        stuck_threshold = self.STUCK_THRESHOLD if stuck_threshold is None else stuck_threshold
        exhaustion_threshold = self.EXHAUSTION_THRESHOLD if exhaustion_threshold is None else exhaustion_threshold
        window = self.WINDOW_SECONDS if window is None else window
        for name, threshold in (
            ("failure_threshold", failure_threshold),
            ("stuck_threshold", stuck_threshold),
            ("exhaustion_threshold", exhaustion_threshold),
        ):
            if threshold < 1:
                raise ValueError(f"{name} is {threshold}: it must be at least 1, else health is never good")
        window_seconds = parse_seconds(window, name="window")
        if not window_seconds > 0:
            raise ValueError(f"window is {window!r}: it must be more than 0")
        self.failure_threshold = failure_threshold
        self.stuck_threshold = stuck_threshold
        self.exhaustion_threshold = exhaustion_threshold
        self.window_seconds = window_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = _Window(window_seconds)
        self._stuck = _Window(window_seconds)
        self._exhaustions = _Window(window_seconds)
        self._critical: dict[str, tuple[str, float]] = {}
        self._degraded: dict[str, tuple[str, float]] = {}
        self._look_at_threads: Callable[[], Mapping[str, str]] = dict
        self._last_error = ""
        self._last_success: datetime | None = None

    def __repr__(self) -> str:
        state, reasons = self._evaluated()
        why = f": {'; '.join(reasons)}" if reasons else ""
        return f"<{type(self).__name__} {state.value}{why}>"

    # --- what is reported ------------------------------------------------------------------------------------

    def record_success(self, n: int = 1) -> None:
        """So many attempts completed, which ends a run of failures. 0 changes nothing."""
        if n < 1:
            return
        with self._lock:
            self._last_success = datetime.now(UTC)
            self._failures.clear()

    def record_failure(self, error: BaseException | str) -> None:
        """An attempt failed. An error that the handler raised about the command does not count.

        Where there is no exception at hand (it happened in another process), a text says what it was.
        """
        if isinstance(error, _NOT_THE_WORKERS):
            return
        text = _one_line(error) if isinstance(error, str) else _described(error)
        with self._lock:
            self._last_error = text
            self._failures.add(self._clock())

    def record_stuck_thread(self) -> None:
        """An attempt did not stop within its grace; once for each."""
        with self._lock:
            self._stuck.add(self._clock())

    def record_pool_exhaustion(self) -> None:
        """Somebody waited for a connection of the pool in vain."""
        with self._lock:
            self._exhaustions.add(self._clock())

    def set_critical(self, reason: str, sentence: str | None = None) -> None:
        """Critical until `clear(reason)`. `sentence` is for operators; without one it is the name in words."""
        self._name(self._critical, reason, sentence)

    def set_degraded(self, reason: str, sentence: str | None = None) -> None:
        """Degraded until `clear(reason)`, likewise."""
        self._name(self._degraded, reason, sentence)

    def clear(self, reason: str) -> None:
        """What was set under this name is over; nothing happens if it was not set."""
        with self._lock:
            self._critical.pop(reason, None)
            self._degraded.pop(reason, None)

    def _name(self, named: dict[str, tuple[str, float]], reason: str, sentence: str | None) -> None:
        with self._lock:
            since = named[reason][1] if reason in named else self._clock()
            named[reason] = (sentence or reason.replace("_", " "), since)

    # --- what it means ---------------------------------------------------------------------------------------

    def watch_threads(self, look: Callable[[], Mapping[str, str]]) -> None:
        """`look` says which threads do not work, by name, with a sentence each. A thread that asks for the health
        calls it, so it must not wait for anything."""
        self._look_at_threads = look

    @property
    def state(self) -> HealthState:
        """The state now."""
        return self._evaluated()[0]

    def is_critical(self) -> bool:
        """Is it CRITICAL now?"""
        return self.state is HealthState.CRITICAL

    @property
    def reasons(self) -> list[str]:
        """Why it is not healthy, a sentence each, the worst first; empty if it is."""
        return self._evaluated()[1]

    @property
    def critical_reasons(self) -> list[str]:
        """The names that `set_critical` set and nobody has cleared, and those of threads that do not work."""
        stopped = self._look_at_threads()
        with self._lock:
            return list(self._critical | dict.fromkeys(stopped, ("", 0.0)))

    @property
    def degraded_reasons(self) -> list[str]:
        """The names that `set_degraded` set and nobody has cleared."""
        with self._lock:
            return list(self._degraded)

    @property
    def last_success(self) -> datetime | None:
        """When an attempt last completed (UTC); None if none has."""
        with self._lock:
            return self._last_success

    @property
    def consecutive_failures(self) -> int:
        """Failures of the window since the last success."""
        with self._lock:
            return self._failures.count(self._clock())

    @property
    def stuck_threads(self) -> int:
        """Attempts of the window that got stuck."""
        with self._lock:
            return self._stuck.count(self._clock())

    @property
    def pool_exhaustions(self) -> int:
        """How often in the window the pool had no connection in time."""
        with self._lock:
            return self._exhaustions.count(self._clock())

    def as_dict(self) -> dict[str, Json]:
        """All of it at one moment, ready for JSON."""
        stopped = self._look_at_threads()
        with self._lock:
            now = self._clock()
            state, reasons = self._evaluate(now, stopped)
            return {
                "status": state.value,
                "reasons": reasons,
                "last_success": None if self._last_success is None else self._last_success.isoformat(),
                "consecutive_failures": self._failures.count(now),
                "stuck_threads": self._stuck.count(now),
                "pool_exhaustions": self._exhaustions.count(now),
            }

    def _evaluated(self) -> tuple[HealthState, list[str]]:
        stopped = self._look_at_threads()
        with self._lock:
            return self._evaluate(self._clock(), stopped)

    def _evaluate(self, now: float, stopped: Mapping[str, str]) -> tuple[HealthState, list[str]]:
        critical, degraded = (
            [f"{sentence} (for {format_seconds(round(now - since))})" for sentence, since in named.values()]
            for named in (self._critical, self._degraded)
        )
        critical += [sentence for name, sentence in stopped.items() if name not in self._critical]
        window = format_seconds(self.window_seconds)
        if (stuck := self._stuck.count(now)) >= self.stuck_threshold:
            critical.append(f"{stuck} attempts got stuck within {window} (limit {self.stuck_threshold})")
        if (exhausted := self._exhaustions.count(now)) >= self.exhaustion_threshold:
            critical.append(
                f"the connection pool was exhausted {exhausted} times within {window} "
                f"(limit {self.exhaustion_threshold})"
            )
        if (failed := self._failures.count(now)) >= self.failure_threshold:
            degraded.append(
                f"{failed} attempts in a row failed within {window} (limit {self.failure_threshold}), "
                f"the last with {self._last_error}"
            )
        if critical:
            return HealthState.CRITICAL, critical + degraded
        return (HealthState.DEGRADED if degraded else HealthState.HEALTHY), degraded


class _Window:
    """Counts what happened within the last `seconds`, in at most some 300 entries.

    What happens within a 300th of the window is one entry, which ends when its first event does. Not thread-safe.
    """

    __slots__ = ("_entries", "_seconds", "_step", "_total")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._step = seconds / 300
        self._entries: deque[list[float]] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        self._forget(now)
        self._total += 1
        if self._entries and now - self._entries[-1][0] < self._step:
            self._entries[-1][1] += 1
        else:
            self._entries.append([now, 1])

    def clear(self) -> None:
        if self._total:
            self._entries.clear()
            self._total = 0

    def count(self, now: float) -> int:
        self._forget(now)
        return self._total

    def _forget(self, now: float) -> None:
        while self._entries and now - self._entries[0][0] >= self._seconds:
            self._total -= int(self._entries.popleft()[1])


def _described(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001 - a hostile __str__ must not cost the worker a slot
        text = f"<__str__ raised {type(broken).__name__}>"
    return _one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _one_line(text: str) -> str:
    text = " ".join(text[: 10 * _LONGEST_ERROR].split())
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "…"
