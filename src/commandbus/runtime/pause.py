"""Pause: after the connection pool was exhausted nothing is claimed for a while, longer each time in a row."""

from __future__ import annotations

from commandbus.clock import monotonic
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.worker")

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 8.0


class Pause:
    """How long to claim nothing."""

    def __init__(self) -> None:
        self._until = 0.0
        self._seconds = FIRST_SECONDS

    @property
    def is_on(self) -> bool:
        """Is nothing to be claimed now?"""
        return self._until > 0.0 and monotonic() < self._until

    def begin(self) -> None:
        """No connection came in time."""
        now = monotonic()
        if now < self._until:
            return
        again = now - self._until < self._seconds * 4
        self._seconds = min(self._seconds * 2, LONGEST_SECONDS) if again else FIRST_SECONDS
        self._until = now + self._seconds
        logger.warning("the connection pool is exhausted: nothing is claimed for %g s", self._seconds)
