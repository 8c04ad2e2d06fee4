"""WaitTimes: how long commands had waited when this worker claimed them, counted once per claim.

Of each claim only the newest command's wait is known, and all of its commands are counted with it. They waited
about as long: a claim takes what is due in order. Nothing is done per command.

Threads: the claimer adds; the maintenance takes. A claim at the very moment of a take may be counted with the next
minute.
"""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.flow.commands.claim import Claim
from commandbus.model.minute_figures import BUCKETS, bucket_of


class WaitTimes:
    """Counts by domain."""

    def __init__(self, domains: Sequence[str]) -> None:
        self._counts = {domain: [0] * BUCKETS for domain in domains}

    def add(self, domain: str, claim: Claim) -> None:
        """These were claimed."""
        if claim.ready and claim.last_vt is not None and claim.claimed_at is not None:
            waited = (claim.claimed_at - claim.last_vt).total_seconds()
            self._counts[domain][bucket_of(waited)] += len(claim.ready)

    def take(self, domain: str) -> list[int]:
        """What was counted since the last call."""
        found, self._counts[domain] = self._counts[domain], [0] * BUCKETS
        return found
