"""DatabaseService: a thread of ours that owns a database connection. All such threads use this loop.

    round ──► round ──► …            a database error that passes: recover, then the next round
      └ orders first, then `round()`  any other error: the service has ended, and says so

The table of SQLSTATEs in `db/transient_errors.py` alone decides what passes: it is raised as a PassingError.

A subclass writes `round`: one portion of work, then `sleep`. Other threads give it orders or wake it; neither
blocks. The loop keeps three times that a monitor can read at any moment: when it last moved, since when its
database is unreachable, and how long a statement has had no answer. `trouble` turns them into a sentence.
"""

from __future__ import annotations

import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import psycopg
from psycopg import Connection

from commandbus.clock import monotonic
from commandbus.db.descriptors import WakeFile
from commandbus.db.pool import is_pooled
from commandbus.db.service_connection import LOCK_SECONDS, LastingConnection
from commandbus.db.transient_errors import PassingError, is_locked
from commandbus.logger import safe_logger
from commandbus.settings import Settings
from commandbus.stalled_thread import LOOK_SECONDS, STILL_SECONDS, StalledThread

logger = safe_logger("commandbus.worker")

SILENT_SECONDS: Final = 8.0
"""A thread that has waited so long for an answer is named as the reason for ill health. A little later its
connection is cut."""
AWAY_SECONDS: Final = 5.0
FAILING_SECONDS: Final = 10.0
"""A service whose every round fails for so long, though its database is there, is named, too."""


class DatabaseService:
    """One thread, one connection."""

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        part: str,
        on_end: Callable[[BaseException], None] | None = None,
        lock_seconds: float = LOCK_SECONDS,
        goes_by_keys: bool = False,
        prepares: bool = True,
    ) -> None:
        self.part = part
        self._connection = LastingConnection(
            settings,
            name=f"{name} {part}",
            on_connect=self.connected,
            lock_seconds=lock_seconds,
            goes_by_keys=goes_by_keys,
            prepares=prepares,
        )
        self._on_end = on_end
        self._settings = settings
        self._orders: deque[Callable[[], None]] = deque()
        self._stopping = threading.Event()
        self._wake = WakeFile()
        # Never closed: somebody may wake us long after the stop, and the thread may use it until the process ends.
        weakref.finalize(self, self._wake.close).atexit = False
        self._thread = threading.Thread(target=self._serve, name=f"{name}-{part}", daemon=True)
        self.moved_at = monotonic()
        self._stalled = StalledThread()
        self.ended: BaseException | None = None
        # Since when no round has succeeded, with which error, and whether the database itself reported that error.
        self._failing: tuple[float, str, bool] | None = None

    # --- asked from other threads; none of these waits, but for `stop` -----------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self.moved_at = monotonic()
        self._thread.start()

    def wake(self) -> None:
        """There is something to look at."""
        self._wake.write()

    def order(self, order: Callable[[], None]) -> None:
        """Let the thread do something before its next round; again, if the database is unreachable."""
        self._orders.append(order)
        self.wake()

    def stop(self, timeout: float) -> None:
        """End after the round that is under way."""
        self._stopping.set()
        self.join(timeout)

    def join(self, timeout: float) -> None:
        """Wake the thread, and wait until it has ended."""
        self.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def leave_to_parent(self) -> None:
        """In a forked process, which has no such thread: do not use its connection or this object again."""
        self._connection.leave_to_parent()

    def flush(self, timeout: float) -> bool:
        """Wait until all orders that were given before are carried out."""
        done = threading.Event()
        self.order(done.set)
        return done.wait(timeout)

    @property
    def is_down(self) -> bool:
        """Is the database away?"""
        return self._connection.is_down

    @property
    def down_since(self) -> float | None:
        """Since when (monotonic) the database is unreachable."""
        return self._connection.down_since

    @property
    def is_away(self) -> bool:
        """Has the database been out of reach for longer than a restart takes?"""
        since = self._connection.down_since
        return since is not None and monotonic() - since >= AWAY_SECONDS

    @property
    def can_listen(self) -> bool:
        """Is the session its own? Then it may LISTEN, and the server keeps its timeouts. Behind a pooler it is
        not. What a pooler refuses is known when the first connection is there."""
        return not is_pooled(self._settings)

    @property
    def is_silent(self) -> bool:
        """Has a statement had no answer for so long that nobody can say whether the database is there?"""
        return self._connection.silent_for >= SILENT_SECONDS

    @property
    def trouble(self) -> str | None:
        """A sentence for operators if this service does not work, and not because the database is unreachable."""
        if self.ended is not None:
            return f"the {self.part} has ended: {type(self.ended).__name__}: {str(self.ended).strip()}"
        if self._thread.ident is None or self._stopping.is_set():
            return None
        if not self._thread.is_alive():
            return f"the {self.part} has ended without an error"
        if self.is_away:
            return None
        if (silent_for := self._connection.silent_for) >= SILENT_SECONDS:
            return f"the {self.part} has had no answer from the database for {silent_for:.0f} s"
        if (failing := self._failing) is not None and monotonic() - failing[0] >= FAILING_SECONDS:
            return f"the {self.part} has failed for {monotonic() - failing[0]:.0f} s: {failing[1]}"
        still_for = self._stalled.seconds(max(self.moved_at, self._connection.waited_until))
        if not silent_for and not self._connection.is_down and still_for >= STILL_SECONDS:
            return f"the {self.part} has not moved for {still_for:.0f} s"
        return None

    @property
    def descriptors_lost(self) -> int:
        """How often somebody has closed a descriptor of this service."""
        return self._connection.sockets_lost + self._wake.times_lost

    @property
    def is_broken(self) -> bool:
        """Will it not recover by itself? A refusal with a SQLSTATE comes from the database: another worker would
        get the same."""
        failing = self._failing
        is_refused = failing is not None and failing[2] and self.ended is None
        return self.trouble is not None and not self._connection.silent_for and not is_refused

    # --- for subclasses ----------------------------------------------------------------------------------------

    def round(self) -> None:
        """One bite of work, and the sleep after it."""
        raise NotImplementedError

    def connected(self, conn: Connection[Any]) -> None:
        """A new connection: the place for `listen`."""

    def listen(self, conn: Connection[Any], *channels: str) -> None:
        """LISTEN on these channels, except behind a pooler, where the session belongs to others."""
        if self.can_listen:
            for channel in channels:
                conn.execute(f"LISTEN {channel}".encode())

    def heard(self, channel: str, payload: str) -> None:
        """A notification came. It is only a hint, because anybody may notify."""

    def lost(self, error: psycopg.Error) -> None:
        """The database refused something or is away; called before the loop recovers."""

    def waited(self) -> None:
        """The database is still away; called after each vain attempt to connect."""

    def finish(self) -> None:
        """The last thing before the connection is closed, after an orderly stop."""

    @property
    def is_done(self) -> bool:
        """Whether the loop is to end."""
        return self._stopping.is_set()

    def sleep(self, seconds: float) -> bool:
        """Sleep until woken, notified, or the time is up; returns whether something happened."""
        if self.hear():
            return True
        end = monotonic() + max(0.0, seconds)
        while True:
            left = max(0.0, end - monotonic())
            if self._poll(min(left, LOOK_SECONDS)):
                return True
            if left <= LOOK_SECONDS:
                return False

    def _poll(self, seconds: float) -> bool:
        """A poll does not end when somebody closes what it waits for, so it must not take long."""
        poll, wake = select.poll(), self._wake.descriptor()
        poll.register(wake, select.POLLIN)
        poll.register(self._connection.conn.fileno(), select.POLLIN)
        happened = poll.poll(seconds * 1000)
        self.moved_at = monotonic()
        for fd, _ in happened:
            if fd == wake:
                self._wake.take()
            else:
                self.hear()
        return bool(happened)

    def hear(self) -> bool:
        """Take in what was notified; returns whether there was anything."""
        # All notifications first: while they come in, no statement can be sent.
        notifications = self._connection.notifications()
        for notification in notifications:
            try:
                self.heard(notification.channel, notification.payload)
            except PassingError:
                raise
            except Exception:
                logger.exception("the %s could not handle a notification", self.part)
        return bool(notifications)

    # --- the thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self.is_done:
                self.moved_at = monotonic()
                try:
                    self._connection.ping()
                    self.carry_out()
                    self.round()
                    self._failing = None
                except (PassingError, OSError) as error:
                    self._recover(error)
            self.finish()
        except BaseException as error:
            self.ended = error
            if self._on_end is None:
                logger.exception("the %s has ended", self.part)
            else:
                self._on_end(error)
        finally:
            self._connection.close()

    def _recover(self, error: PassingError | OSError) -> None:
        """Recover from an error. An OSError comes from a descriptor that is no longer ours."""
        if isinstance(error, OSError):
            self._connection.close()
            error = PassingError(str(error))
        if not is_locked(error):
            since = monotonic() if self._failing is None else self._failing[0]
            self._failing = since, _first_line(error), error.sqlstate is not None
        self.lost(error)
        began = monotonic()
        self._connection.recover(self._stopping, error, on_wait=self.waited)
        if monotonic() - began >= AWAY_SECONDS:
            self._failing = None  # the database was away, and is back

    def carry_out(self) -> None:
        """Carry out the orders. An order that met a lost database stays first in line. No other error ends the
        thread."""
        while self._orders:
            try:
                self._orders[0]()
            except PassingError as error:
                if is_locked(error):
                    self._orders.rotate(-1)  # this row is tried later; the orders behind it are carried out now
                raise
            except Exception:
                logger.exception("the %s could not carry out an order", self.part)
            self._orders.popleft()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
