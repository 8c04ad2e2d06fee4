"""Notices that a thread of ours does not move any more. Its loop notes the time at each turn."""

from __future__ import annotations

from typing import Final

from commandbus.clock import monotonic

STILL_SECONDS: Final = 10.0
"""A thread that has not moved for so long is named as the reason for ill health."""
LATE_SECONDS: Final = 1.5
"""Threads of ours move at least once a second. One that has not for so long is late."""
LOOK_SECONDS: Final = 1.0


class StalledThread:
    """For how long a thread has not moved.

    A thread that is found still is looked at twice, a second apart. After a SIGSTOP all threads are late, and the
    first one to wake would find the others still. Any thread may look.
    """

    def __init__(self) -> None:
        self._found: tuple[float, float] | None = None  # what it has not moved since, and when that was found

    def seconds(self, moved_at: float) -> float:
        """Seconds since it moved; 0 if nobody has found it late before."""
        now, found = monotonic(), self._found
        if now - moved_at < LATE_SECONDS:
            self._found = None
        elif found is None or found[0] != moved_at:
            self._found = moved_at, now
        elif now - found[1] >= LOOK_SECONDS:
            return now - moved_at
        return 0.0
