"""BatchFolding: folds the batches of what this worker has settled, on the settler's thread and connection.

One statement folds all batches that were touched, four times a second under load, and as soon as there is nothing
to settle. So a batch is complete a moment after its last member. A batch that another worker is folding is tried
again. An error here must not keep outcomes from being written: it is logged, folding is tried again later, and the
maintenance threads of all workers fold what is left. A batch that was refused (another transaction holds the
command_id of its completion) is tried separately from then on, less and less often, so the others do not wait for
it. If folding is slow (a transaction that stays open elsewhere keeps every deleted delta of a batch), it takes no
more than a twentieth of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from commandbus.clock import monotonic
from commandbus.db.service_connection import LastingConnection
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.logger import safe_logger
from commandbus.model.reconnect_backoff import Backoff

logger = safe_logger("commandbus.worker")

FOLD_SECONDS = 0.25
QUIET_SECONDS = 0.02
REFUSED_SECONDS = 5.0
LONGEST_REFUSED_SECONDS = 30.0
AT_ONCE = 200  # batches in one transaction
SHARE = 20


class Refused:
    """Batches that could not be folded, and when each is to be tried again."""

    def __init__(self, first: float = REFUSED_SECONDS, longest: float = LONGEST_REFUSED_SECONDS) -> None:
        self._first = first
        self._longest = longest
        self._pauses: dict[int, tuple[float, Backoff]] = {}  # until when

    def __contains__(self, batch: int) -> bool:
        return batch in self._pauses

    def add(self, batch: int) -> float:
        """It was refused, perhaps again. Returns for how long it is left alone."""
        _, backoff = self._pauses.get(batch) or (0.0, Backoff(self._first, self._longest))
        self._pauses[batch] = (monotonic() + backoff.next(), backoff)
        return backoff.seconds

    def discard(self, batch: int) -> None:
        """It was not refused."""
        self._pauses.pop(batch, None)

    def resting(self) -> list[int]:
        """Those that are left alone."""
        now = monotonic()
        return [batch for batch, (until, _) in self._pauses.items() if until > now]

    def next(self) -> tuple[float, int] | None:
        """Which of them is due first, and when."""
        return min(((until, batch) for batch, (until, _) in self._pauses.items()), default=None)

    def forget_old(self) -> None:
        """Forget those that nobody has asked for since their pause was over."""
        now = monotonic()
        self._pauses = {
            batch: (until, backoff)
            for batch, (until, backoff) in self._pauses.items()
            if until + 2 * backoff.seconds > now
        }


class BatchFolding:
    """Which batches are to be folded, and when."""

    def __init__(self, connection: LastingConnection) -> None:
        self._connection = connection
        self._touched: deque[int] = deque()
        self._waiting: set[int] = set()
        self._refused = Refused()
        self._next_at = 0.0
        self._slow_until = 0.0

    def touch(self, batch: int) -> None:
        """Something in this batch was settled. Called by any thread; never waits."""
        self._touched.append(batch)

    def pause(self) -> float | None:
        """After how many quiet seconds to call `fold`; None: there is nothing to fold."""
        if self._touched:
            until = self._slow_until
        elif self._waiting:
            until = self._next_at
        elif (refused := self._refused.next()) is not None:
            until = max(refused[0], self._next_at)
        else:
            return None
        return max(until - monotonic(), QUIET_SECONDS)

    def fold_if_due(self) -> None:
        """Fold, unless that was done a moment ago."""
        if monotonic() >= self._next_at and self.pause() is not None:
            self.fold()

    def fold(self) -> None:
        """Fold what there is; never raises an error."""
        while self._touched:
            batch = self._touched.popleft()
            if batch not in self._refused:
                self._waiting.add(batch)
        seconds = 0.0
        if chosen := sorted(self._waiting)[:AT_ONCE]:
            began = monotonic()
            if self._try(chosen):
                seconds = monotonic() - began
            elif (
                len(chosen) > 1 and not self._connection.conn_is_lost()
            ):  # one bad batch must not fail its neighbors
                self._one_by_one(chosen)
        if not self._connection.conn_is_lost():
            self._try_refused()
        now = monotonic()
        rest = seconds * SHARE
        if self._connection.conn_is_lost():
            rest = REFUSED_SECONDS  # the next write connects again
        self._next_at = now + max(rest, FOLD_SECONDS)
        self._slow_until = now + rest if rest > FOLD_SECONDS else 0.0

    def _try(self, batches: Sequence[int]) -> bool:
        """Fold these together; False if that was refused."""
        try:
            done = self._connection.run(fold(batches))
        except Exception as error:  # noqa: BLE001 - whatever it is, the settler must go on
            if len(batches) == 1 and not self._connection.conn_is_lost():
                self._waiting.discard(batches[0])
                text = "batch %d cannot be folded now, trying again in %.0f s: %s"
                logger.warning(text, batches[0], self._refused.add(batches[0]), _shown(error))
            return False
        self._waiting -= done
        return True

    def _one_by_one(self, batches: Sequence[int]) -> None:
        """Fold them one by one, for a second at most, because outcomes wait. Then it is known which are
        refused."""
        until = monotonic() + 1.0
        for batch in batches:
            self._try([batch])
            if self._connection.conn_is_lost() or monotonic() > until:
                return

    def _try_refused(self) -> None:
        """The next of those that have waited long enough."""
        refused = self._refused.next()
        if refused is not None and refused[0] <= monotonic() and self._try([refused[1]]):
            self._refused.discard(refused[1])
            self._waiting.add(refused[1])  # somebody may have locked it, and may have changed it meanwhile


def _shown(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
