"""How soon a dead worker is replaced: at once, unless workers die one after the other.

A death within EARLY_SECONDS of the start counts. The series ends when a worker that was started after the last
such death lives longer. Workers that were started before prove nothing about new ones. Without a visible cause the
pauses are 0, 1, 2, 4 … 30 s, because something is wrong with the program or the machine. If attempts ran, they are
the cause, and max_attempts bounds how often that happens. Then the first few deaths in a row cost no pause, and
each further death costs a second, so that many bad commands do not cause a storm of process starts.
"""

from __future__ import annotations

import math
from typing import Final

from commandbus.model.reconnect_backoff import Backoff

EARLY_SECONDS: Final = 10.0
FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 30.0
FREE_CRASHES: Final = 3
CRASH_SECONDS: Final = 1.0


class RestartBudget:
    """Pure bookkeeping; instants are of the caller's clock."""

    def __init__(self) -> None:
        self.next_at = -math.inf
        self._unexplained = 0
        self._backoff = Backoff(FIRST_SECONDS, LONGEST_SECONDS)
        self._crashes = 0
        self._failed_at = -math.inf
        self._round_at = -math.inf
        self._cause = ""
        self._times = 0

    def died(self, now: float, *, lived_seconds: float, was_running: bool) -> float:
        """Note that a worker died unexpectedly. Returns the pause before its replacement."""
        born_at = now - lived_seconds
        if lived_seconds >= EARLY_SECONDS:
            self.survived(born_at)
            return max(0.0, self.next_at - now)
        pause = 0.0
        if was_running:
            self._crashes += 1
            pause = 0.0 if self._crashes <= FREE_CRASHES else CRASH_SECONDS
        elif born_at >= self._round_at:  # workers that were started together fail together, and count once
            self._unexplained += 1
            self._round_at = now
            pause = 0.0 if self._unexplained == 1 else self._backoff.next()
        self._failed_at = now
        self.next_at = max(self.next_at, now + pause)
        return self.next_at - now

    def times(self, cause: str) -> int:
        """How often in a row workers have failed for this cause, this time included."""
        self._times = self._times + 1 if cause == self._cause else 1
        self._cause = cause
        return self._times

    def survived(self, born_at: float) -> None:
        """Note that a worker has lived for EARLY_SECONDS. If it started after the last death, the series is
        over."""
        if born_at >= self._failed_at:
            self._unexplained = self._crashes = self._times = 0
            self._backoff.reset()
            self._cause = ""

    def may_start(self, now: float) -> bool:
        """Has the pause passed?"""
        return now >= self.next_at
