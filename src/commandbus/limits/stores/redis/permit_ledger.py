"""What one program has of the permits that Redis keeps, and what Redis or PostgreSQL must still be told of them.

    keep ──► held ──give──► owed (Redis does not know yet) ──► told, or over
              └──► its lease ends

PostgreSQL knows, for each limit, the most that this program may hold. That is never less than it does hold. The
ledger asks neither Redis nor PostgreSQL; `store.py` and `outage.py` do. One thread calls it, except for
`renewed_beside`. A renewal there counts only if Redis was not lost meanwhile (`lives`), because in that case
PostgreSQL was told of shorter leases.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from commandbus.clock import boottime
from commandbus.flow.limits.redis_outage import Held
from commandbus.model.limit_values import LimitValues


@dataclass(slots=True)
class HeldPermit:
    """A permit of this program: the earliest moment at which its lease ends, and how long the lease was. `epoch`:
    the epoch in which Redis knows it; None: only PostgreSQL knows it."""

    ends: float
    seconds: float
    epoch: str | None


class PermitLedger:
    """The permits of one program, by limit and token."""

    def __init__(self) -> None:
        self.limits: dict[str, LimitValues] = {}
        self.held: defaultdict[str, dict[str, HeldPermit]] = defaultdict(dict)
        # Permits that were released, but that Redis does not know as released yet, and until when that matters.
        self.owed: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._most: dict[str, int] = {}  # by limit, the most that we may hold, as PostgreSQL was told
        self._peak: defaultdict[str, int] = defaultdict(int)  # the most that we held since then
        self._lock = threading.Lock()
        self.lives = 0  # how often Redis was lost

    def __bool__(self) -> bool:
        return any(self.held.values())

    def keep(
        self, limit: LimitValues, tokens: Sequence[str], began: float, seconds: float, epoch: str | None
    ) -> None:
        """Remember these permits. Their lease counts from before the request, so that it never ends later here."""
        held = self.held[limit.name]
        with self._lock:
            for token in tokens:
                held[token] = HeldPermit(began + seconds, seconds, epoch)
        self._peak[limit.name] = max(self._peak[limit.name], len(held))

    def begin_life(self) -> None:
        """Note that Redis is lost: a renewal that was requested before does not count any more."""
        with self._lock:
            self.lives += 1

    def renewed_beside(
        self, limit: LimitValues, tokens: Sequence[str], began: float, epoch: str, life: int
    ) -> list[str]:
        """Remember what another thread has renewed. Returns the tokens for which that counts."""
        with self._lock:
            held = self.held[limit.name]
            if life != self.lives:
                return []
            counted = [token for token in tokens if token in held and held[token].epoch == epoch]
            for token in counted:
                held[token] = HeldPermit(began + limit.lease, limit.lease, epoch)
            return counted

    def release(self, limit: LimitValues, tokens: Sequence[str]) -> None:
        """Remove released permits. If Redis knows them, or may know them, it must be told."""
        ends, held = boottime() + limit.lease, self.held[limit.name]
        for token in tokens:
            with self._lock:
                permit = held.pop(token, None)
            if permit is None or permit.epoch is not None:
                self.owed[limit.name][token] = ends

    def lose(self, limit: LimitValues, tokens: Sequence[str]) -> None:
        """Remove lost permits: other programs may have them now."""
        with self._lock:
            for token in tokens:
                self.held[limit.name].pop(token, None)

    def ending(self, limit: LimitValues, tokens: Sequence[str], seconds: float) -> list[str]:
        """Which of these permits end within so many seconds, or are not ours at all?"""
        soon, held = boottime() + seconds, self.held[limit.name]
        return [token for token in tokens if token not in held or held[token].ends <= soon]

    def forgotten(self, limit: LimitValues, tokens: Sequence[str], epoch: str) -> list[str]:
        """Which of these permits does Redis know only from another epoch? Those whose lease has ended are left
        out."""
        now, held = boottime(), self.held[limit.name]
        return [
            token for token in tokens if token in held and held[token].epoch != epoch and held[token].ends > now
        ]

    def forget_old(self) -> None:
        """Remove permits whose lease has ended, such as those that were reserved for another program."""
        now = boottime()
        with self._lock:
            for held in self.held.values():
                for token in [token for token, permit in held.items() if permit.ends <= now]:
                    del held[token]
        for owed in self.owed.values():
            for token in [token for token, ends in owed.items() if ends <= now]:
                del owed[token]

    # ── What PostgreSQL is told ─────────────────────────────────────────────────────────────────────────────────

    def plan(self, limit: LimitValues, more: int) -> bool:
        """We may soon hold so many more. Returns True if PostgreSQL must be told first, because it knows of
        fewer."""
        if limit.concurrency is None:
            return False
        known, held = self._most.get(limit.name, 0), len(self.held[limit.name])
        needed = min(held + more, max(held, limit.concurrency))
        if needed <= known:
            return False
        self._peak[limit.name] = max(needed, min(2 * known, limit.concurrency))
        return True

    def count(self) -> dict[str, int]:
        """By limit, the most permits that we have held since PostgreSQL was last told."""
        names = {*self.held, *self._peak}
        counted = {name: max(len(self.held[name]), self._peak[name]) for name in names}
        return {name: count for name, count in counted.items() if count}

    def note_told(self, most: dict[str, int]) -> None:
        """Note what PostgreSQL was told."""
        self._most = most
        self._peak.clear()

    def tokens(self) -> Held:
        """What we hold, and what is left of each lease."""
        now = boottime()
        return {
            name: {"left": {token: permit.ends - now for token, permit in held.items() if permit.ends > now}}
            for name, held in self.held.items()
            if held
        }
