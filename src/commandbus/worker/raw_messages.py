"""The Adopter: reads raw messages. It turns valid ones into commands, and sets the others aside.

A raw message is one that another PGMQ client has sent. It may have any size, and a small one may be a gigabyte of
text. So the claimer does not read it, because the next claim would have to wait: it claims the message and hands
it over. The thread and its connection are created when the first raw message comes.

What is handed over is leased like any claimed message. If this worker dies first, the leases run out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import psycopg

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.flow.commands.claim import ANY_ROOM
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.logger import safe_logger
from commandbus.settings import Settings
from commandbus.worker.bad_rows import ClaimedRows, OddRows

logger = safe_logger("commandbus.worker")

LONGEST_SLEEP = 1.0
LOCKED_SECONDS = 1.0
MOST_ROWS = 2000


class Adopter(DatabaseService):
    """One thread for raw messages."""

    def __init__(
        self, settings: Settings, worker: str, *, on_error: Callable[[BaseException], None], name: str
    ) -> None:
        super().__init__(settings, name=name, part="adopter", on_end=on_error)
        self._rows = OddRows(self._connection, worker, settings, keeps_lock_timeout=lambda: self.can_listen)
        self._lease = settings.visibility_timeout
        self._queue: deque[tuple[ClaimedRows, float]] = deque()
        self._is_started = False
        self._taken = 0  # rows, by the claimer's thread
        self._read = 0  # by ours
        self.on_read: Callable[[str, float], None] | None = None
        """Told of a domain whose messages were read, and how long that took; on this thread."""

    @property
    def is_busy(self) -> bool:
        """Are there messages that it has not read yet?"""
        return bool(self._queue)

    @property
    def is_full(self) -> bool:
        """Has it as many messages to read as it may have? Forged messages look like commands of ours, so
        the claimer cannot pass them by."""
        return self._taken - self._read >= MOST_ROWS

    def take(self, domain: str, raw: Sequence[ClaimedRow], claimed_at: float) -> None:
        """The claimer has claimed these. Called by its thread alone; never waits."""
        self._queue.append((ClaimedRows(domain, claimed_at, list(raw)), monotonic() + self._lease / 2))
        self._taken += len(raw)
        if not self._is_started:
            try:
                self.start()
            except RuntimeError as error:  # no thread is left; a later message tries again
                logger.warning("raw messages cannot be read now, and return when their leases end: %s", error)
                self._queue.clear()
                self._read = self._taken
                return
            self._is_started = True
        self.wake()

    def lost(self, error: psycopg.Error) -> None:  # noqa: ARG002 - whatever it is
        self._rows.forget_left()  # what was being read is still first in line

    def round(self) -> None:
        self._rows.try_again(self._put_right, LOCKED_SECONDS)
        if not self._queue:
            pause = self._rows.next_seconds
            self.sleep(LONGEST_SLEEP if pause is None else pause)
            return
        claimed, until = self._queue[0]
        began = monotonic()
        if began < until:  # otherwise their leases may have ended while the database was away
            self._rows.put_right(claimed, ANY_ROOM, until=until)
        self._queue.popleft()
        self._read += len(claimed.rows)
        if self.on_read is not None:
            self.on_read(claimed.domain, monotonic() - began)

    def finish(self) -> None:
        try:
            self._rows.try_again(self._put_right, LOCKED_SECONDS, is_last=True)
        except psycopg.Error as error:
            logger.info("raw messages return when their leases end: %s", error)

    def _put_right(self, claimed: ClaimedRows, until: float) -> None:
        """Some of them needed what somebody had locked."""
        began = monotonic()
        _, adopted = self._rows.put_right(claimed, ANY_ROOM, until=until)
        if adopted and self.on_read is not None:
            self.on_read(claimed.domain, monotonic() - began)
