"""The concurrency budget: how many attempts run at once, sync and async together.

A slot takes one unit of the budget when it wakes, and returns it when it finds nothing to do. So units rarely
change hands. If the sync or the async slots (a lane) need a unit and get none, that lane is `hungry`. Slots of the
other lane check that after each command, and hand their unit over. So neither lane can starve the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from commandbus.clock import monotonic


class Lane(Protocol):
    """Slots that compete for the budget."""

    is_hungry: bool

    def wake_one(self) -> None:
        """Wake a slot, if there is work for it and the budget allows it."""


class ConcurrencyBudget:
    """The worker's concurrency. `on_free` is called, by any thread, whenever a unit was returned."""

    def __init__(self, total: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.total = total
        self._on_free = on_free
        self.taken = 0
        self._busy_seconds = 0.0
        self._busy_since = 0.0  # while some unit is taken
        self._lock = threading.Condition()
        self._lanes: list[Lane] = []

    def join(self, lane: Lane) -> None:
        """A lane takes part."""
        self._lanes.append(lane)

    @property
    def busy_seconds(self) -> float:
        """For how long, in all, at least one slot has been awake."""
        with self._lock:
            return self._busy_seconds + (monotonic() - self._busy_since if self.taken else 0.0)

    def take(self, lane: Lane) -> bool:
        """Take a unit for a slot of this lane."""
        with self._lock:
            if self.taken < self.total:
                if not self.taken:
                    self._busy_since = monotonic()
                self.taken += 1
                lane.is_hungry = False
                return True
            lane.is_hungry = True
            return False

    def give(self, lane: Lane) -> None:
        """Return a unit, or hand it to the other lane if that needs one."""
        with self._lock:
            self.taken -= 1
            if not self.taken:
                self._busy_seconds += monotonic() - self._busy_since
                self._lock.notify_all()
        for other in self._lanes:
            if other is not lane and other.is_hungry:
                other.wake_one()
        self._on_free()

    def wait_until_free(self, timeout: float) -> None:
        """Wait until no slot holds a unit."""
        with self._lock:
            if self.taken:
                self._lock.wait(timeout)

    def others_hungry(self, lane: Lane) -> bool:
        """Does another lane wait for a unit?"""
        return any(other.is_hungry for other in self._lanes if other is not lane)
