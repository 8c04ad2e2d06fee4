"""The PermitClock ends every permit at the end of its lease, whatever the limit client waits for.

It works in memory only, on a thread of its own: neither PostgreSQL nor Redis can stop it. A permit whose lease was
not renewed in time is lost a moment *before* another caller can get it. Its holder is notified, and has that
moment to stop. Time counts by `clock.boottime()`, so a process that was stopped and continues is notified at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from commandbus.clock import boottime
from commandbus.limits.requests import Permit
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.limits")

LOOK_SECONDS = 1.0
"""The longest pause between two looks. So a machine that was suspended is noticed within this time."""


class PermitClock:
    """Watches the permits that one program holds. Any thread may call `watch` and `forget`."""

    def __init__(self, name: str, on_end: Callable[[Permit], None]) -> None:
        self._on_end = on_end
        self._permits: dict[Permit, None] = {}
        self._wake = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name=f"{name}-hold-clock", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """No more permits will be held. The thread ends when the last permit has ended."""
        self._is_over = True
        self._wake.set()

    @property
    def has_ended(self) -> bool:
        """Has the thread ended although nobody stopped it?"""
        return self._thread.ident is not None and not self._is_over and not self._thread.is_alive()

    def watch(self, permit: Permit) -> None:
        """End this permit when its lease ends."""
        self._permits[permit] = None
        self._wake.set()

    def forget(self, permit: Permit) -> None:
        """Stop watching this permit."""
        self._permits.pop(permit, None)

    def _serve(self) -> None:
        while self._permits or not self._is_over:
            self._wake.clear()
            now = boottime()
            for permit in list(self._permits):
                if now >= permit.ends_at:
                    self._end(permit)
            if (pause := self._pause()) != 0:
                self._wake.wait(pause)

    def _pause(self) -> float | None:
        """Seconds until the next look; None: until a permit is held."""
        soonest = min((permit.ends_at for permit in list(self._permits)), default=None)
        if soonest is None:
            return 0 if self._is_over else None
        return min(max(soonest - boottime(), 0.01), LOOK_SECONDS)

    def _end(self, permit: Permit) -> None:
        self.forget(permit)
        try:
            self._on_end(permit)
        except Exception:
            logger.exception("the holder of a permit of limit %s could not be told of its end", permit.limit)
