"""How many attempts run at once, in both lanes together.

A slot takes a place when it wakes and returns it when it finds nothing to do, not for every command: places
change hands rarely. A lane that needs a place and gets none is `hungry`; slots of the other lane look at that
after each command and hand theirs over, so neither lane can starve the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Lane(Protocol):
    """What competes for places."""

    is_hungry: bool

    def wake_one(self) -> None:
        """Wake a slot, if there is work for it and a place."""


class ConcurrencyBudget:
    """The worker's concurrency. `on_free` is called, by any thread, whenever a place was returned."""

    def __init__(self, total: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.total = total
        self._on_free = on_free
        self.taken = 0
        self._lock = threading.Condition()
        self._lanes: list[Lane] = []

    def join(self, lane: Lane) -> None:
        """A lane takes part."""
        self._lanes.append(lane)

    def take(self, lane: Lane) -> bool:
        """Take a place for a slot of this lane."""
        with self._lock:
            if self.taken < self.total:
                self.taken += 1
                lane.is_hungry = False
                return True
            lane.is_hungry = True
            return False

    def give(self, lane: Lane) -> None:
        """Return a place; the other lane is asked first whether it needs it."""
        with self._lock:
            self.taken -= 1
            if not self.taken:
                self._lock.notify_all()
        for other in self._lanes:
            if other is not lane and other.is_hungry:
                other.wake_one()
        self._on_free()

    def wait_until_free(self, timeout: float) -> None:
        """Wait until no slot holds a place."""
        with self._lock:
            if self.taken:
                self._lock.wait(timeout)

    def others_hungry(self, lane: Lane) -> bool:
        """Does another lane wait for a place?"""
        return any(other.is_hungry for other in self._lanes if other is not lane)
