"""ClaimPacing: how many attempts may wait before the slots (the prefetch).

As many as the slots start within 40 ms. The rate is that of slots that have work: time in which all of them were
idle does not count. If it did, a worker that claims little would look slow, and a slow worker claims little. So a
burst would be claimed in small portions for a tenth of a second.

A rate that a few commands have shown is not trusted with hundreds of others: what is prefetched is at most eight
times what has finished between two looks, and that begins anew after idleness. With slow handlers nothing is
prefetched, so no command waits in one worker while another is idle.

If the server is slow or far away, the prefetch is for the time of two claims: otherwise slow claims would limit
the rate.

It has no clock and no threads: `worker/claimer.py` calls it.
"""

from __future__ import annotations

from typing import Final

LARGEST_PREFETCH: Final = 2000
PREFETCH_SECONDS: Final = 0.04
LONGEST_PREFETCH_SECONDS: Final = 0.4
GROWTH: Final = 8
"""So many times what has finished may be prefetched."""
MEMORY_SECONDS: Final = 0.02
"""Over so long the rate is measured."""
NEWEST: Final = 0.3
"""The weight of the newest claim in the usual time of one."""


class ClaimPacing:
    """The prefetch of one worker."""

    def __init__(self) -> None:
        self._finished = 0
        self._busy_seconds = 0.0
        self._done = 0.0  # of late, in so many seconds
        self._seconds = 0.0
        self._trusted = 0
        self.claim_seconds = 0.0  # what asking all domains takes, of late

    @property
    def per_second(self) -> float:
        """How many attempts the slots finish in a second in which they have work."""
        return self._done / self._seconds if self._seconds else 0.0

    @property
    def prefetch(self) -> int:
        """How many attempts may wait before the slots."""
        ahead = max(PREFETCH_SECONDS, min(2 * self.claim_seconds, LONGEST_PREFETCH_SECONDS))
        return min(LARGEST_PREFETCH, self._trusted, int(self.per_second * ahead))

    def observe(self, finished: int, busy_seconds: float) -> None:
        """So many attempts have finished in all, and for so long some slot has had work."""
        done, seconds = finished - self._finished, busy_seconds - self._busy_seconds
        if seconds <= 0:
            return
        kept = max(0.0, 1 - seconds / MEMORY_SECONDS)
        self._done = self._done * kept + done
        self._seconds = self._seconds * kept + seconds
        self._trusted = max(self._trusted, GROWTH * done)
        self._finished, self._busy_seconds = finished, busy_seconds

    def claimed(self, seconds: float) -> None:
        """All domains were asked, which took so long."""
        self.claim_seconds += (seconds - self.claim_seconds) * NEWEST

    def rest(self) -> None:
        """There is nothing to claim: who knows what comes next."""
        self._trusted = 0
