"""budget: how soon a dead worker is replaced. At once, unless workers die one after the other.

A death within EARLY_SECONDS of its start counts; one that lived longer ends the row. Without a visible cause the
pauses are 0, 1, 2, 4 … 30 s: something is wrong with the program or the machine. Where attempts were running,
those caused it, and their number is limited by max_attempts: a few deaths in a row cost no pause and then a second
each, so that a pile of poisonous commands does not turn into a storm of process starts.
"""

from __future__ import annotations

import math
from typing import Final

EARLY_SECONDS: Final = 10.0
LONGEST_SECONDS: Final = 30.0
FREE_CRASHES: Final = 3
CRASH_SECONDS: Final = 1.0


class RestartBudget:
    """Pure bookkeeping; instants are the caller's clock."""

    def __init__(self) -> None:
        self.next_at = -math.inf
        self._unexplained = 0
        self._crashes = 0

    def died(self, now: float, *, lived_seconds: float, was_running: bool) -> float:
        """A worker died that was not meant to; answers the pause before its replacement."""
        if lived_seconds >= EARLY_SECONDS:
            self._unexplained = self._crashes = 0
            return 0.0
        if was_running:
            self._crashes += 1
            pause = 0.0 if self._crashes <= FREE_CRASHES else CRASH_SECONDS
        else:
            self._unexplained += 1
            doublings = min(self._unexplained - 2, 10)
            pause = 0.0 if self._unexplained == 1 else min(LONGEST_SECONDS, 2.0**doublings)
        self.next_at = max(self.next_at, now + pause)
        return pause

    def survived(self) -> None:
        """A worker has lived longer than EARLY_SECONDS: the row is over."""
        self._unexplained = self._crashes = 0

    def may_start(self, now: float) -> bool:
        """Has the pause passed?"""
        return now >= self.next_at
