"""ClaimPause: while connections or threads are used up, nothing is claimed, for longer each time in a row. Nor is
anything claimed while an operator has paused the worker."""

from __future__ import annotations

from commandbus.clock import monotonic
from commandbus.logger import safe_logger
from commandbus.model.reconnect_backoff import Backoff

logger = safe_logger("commandbus.worker")

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 8.0


class ClaimPause:
    """How long to claim nothing."""

    def __init__(self) -> None:
        self._until = 0.0
        self._backoff = Backoff(FIRST_SECONDS, LONGEST_SECONDS)
        self.is_by_operator = False  # until the operator resumes the worker

    @property
    def is_on(self) -> bool:
        """Is nothing to be claimed now?"""
        return self.is_by_operator or (self._until > 0.0 and monotonic() < self._until)

    def begin(self, reason: str) -> None:
        """No connection came in time, or no thread could be started."""
        now = monotonic()
        if now < self._until:
            return
        if now - self._until >= self._backoff.seconds * 4:
            self._backoff.reset()
        self._until = now + self._backoff.next()
        logger.warning("%s: nothing is claimed for %g s", reason, self._backoff.seconds)
