"""A connection that one thread owns and that comes back by itself: each of a worker's own services has one.

`run` raises PassingError for everything that passes (`db/transient_errors.py` decides by SQLSTATE). `recover`
waits, with growing pauses, until the server is back or the owner stops. Nothing is retried here: only the owner
knows whether its operation may be.

Every session has limits: how long a statement may take, how long it may wait for a lock, and how long its server
may be silent (`db/answer_clock.py`). On a direct connection the server keeps the first two, set as the session
starts. Behind PgBouncer in transaction mode nothing may be left in a session: there the answer clock cancels,
and `ALTER ROLE … SET` (which `commandbus roles` prints) does the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import psycopg
from psycopg import Connection

from commandbus.clock import monotonic
from commandbus.db.answer_clock import PendingAnswer
from commandbus.db.drivers import LostSocketError, OwnConnection, Runnable, run
from commandbus.db.pool import ask_default_level, connect_own, cut
from commandbus.db.transient_errors import READ_ONLY, OtherPassingError, PassingError, is_passing
from commandbus.logger import safe_logger
from commandbus.model.reconnect_backoff import Backoff
from commandbus.settings import Settings

T = TypeVar("T")
logger = safe_logger("commandbus.worker")

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 2.0
STATEMENT_SECONDS: Final = 10.0
LOCK_SECONDS: Final = 2.0
QUIET_SECONDS: Final = 3.0
REFUSALS: Final = 5
"""After so many in a row the connection itself may be the reason: it is made anew."""
SILENT_SECONDS: Final = 12.0
"""A server that has not answered for so long is lost."""


class LastingConnection:
    """One connection, one thread.

    `prepares=False` is for sessions whose statements run every few seconds: each would be planned anew anyway, and
    dropping the old plans would be a round trip more (ADR 15).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        on_connect: Callable[[Connection[Any]], None] | None = None,
        lock_seconds: float = LOCK_SECONDS,
        goes_by_keys: bool = False,
        prepares: bool = True,
    ) -> None:
        self._settings = settings
        self._name = name
        self._lock_seconds = lock_seconds
        self._goes_by_keys = goes_by_keys
        self._prepares = prepares
        self._on_connect = on_connect
        self._conn: OwnConnection | None = None
        self._question = PendingAnswer(name, cancel_after=STATEMENT_SECONDS + 0.5, cut_after=SILENT_SECONDS)
        self._failures = 0
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._answered_at = 0.0
        self.down_since: float | None = None
        self.sockets_lost = 0

    @property
    def is_down(self) -> bool:
        """Is the database away?"""
        return self.down_since is not None

    @property
    def silent_for(self) -> float:
        """Seconds for which the server owes an answer."""
        return self._question.waits_for

    @property
    def waited_until(self) -> float:
        """When (monotonic) the last wait for an answer ended."""
        return self._question.ended_at

    @property
    def conn(self) -> OwnConnection:
        """The connection; made on first use."""
        if self._conn is None or self._conn.closed:
            try:
                self._conn = self._connect()
            except psycopg.Error as error:
                self._raise(error)
        elif not self._conn.has_its_socket:
            raise LostSocketError(f"somebody in this process has closed the socket of {self._name}")
        return self._conn

    def run(self, operation: Runnable[T]) -> T:
        """Run an operation on it. What passes by itself is raised as a PassingError."""
        try:
            conn = self.conn
            with self._question.asked(conn):
                answer = run(conn, operation)
        except psycopg.Error as error:
            self._raise(error)
        if self._failures:
            self._failures = 0
            self._backoff.reset()
        self._answered_at = monotonic()
        return answer

    def ping(self) -> None:
        """Ask for a sign of life if there was none for a while: an idle connection may be dead without a word."""
        if monotonic() - self._answered_at >= QUIET_SECONDS:
            try:
                conn = self.conn
                with self._question.asked(conn):
                    conn.execute(b"SELECT")
            except psycopg.Error as error:
                self._raise(error)
            self._answered_at = monotonic()

    def notifications(self) -> list[psycopg.Notify]:
        """What was notified since the last look."""
        conn = self.conn
        try:
            return list(conn.notifies(timeout=0))
        except psycopg.Error as error:
            self._raise(error)

    def _raise(self, error: psycopg.Error) -> NoReturn:
        """As a PassingError if it passes by itself. Read-only also drops the connection."""
        if error.sqlstate == READ_ONLY:
            self._drop()  # another server may be the one that can write
        if is_passing(error, is_lost=self.conn_is_lost()) and not isinstance(error, PassingError):
            raise OtherPassingError(error) from error
        raise error

    def conn_is_lost(self) -> bool:
        """Was the last error the connection's end, rather than the statement's?"""
        conn = self._conn
        return conn is None or not conn.has_its_socket or conn.closed or conn.broken

    def recover(
        self, stopping: threading.Event, error: psycopg.Error, on_wait: Callable[[], None] = lambda: None
    ) -> bool:
        """Get over an error that passes: connect again, or give the server (a full disk, a lock) a moment.

        `on_wait` is called after every attempt to connect that failed. Returns False if the owner was told to
        stop.
        """
        pause = self._backoff.next()
        self._failures += 1
        if self._failures % REFUSALS and not self.conn_is_lost():
            logger.error("%s was refused by the database, trying again: %s", self._name, str(error).strip())
            return not stopping.wait(pause)
        if self._failures > 1 and stopping.wait(pause):
            return False  # it connected, but the first statement failed again
        return self.restore(stopping, error, on_wait)

    def restore(
        self, stopping: threading.Event, error: Exception, on_wait: Callable[[], None] = lambda: None
    ) -> bool:
        """Connect again, however long it takes; False if the owner was told to stop first."""
        self._drop()
        if self.down_since is None:
            logger.warning("%s lost the database, reconnecting: %s", self._name, str(error).strip())
            self.down_since = monotonic()
        backoff, since = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS), self.down_since
        while not stopping.is_set():
            began = monotonic()
            try:
                self._conn = self._connect()
            except (psycopg.Error, OSError):  # OSError: somebody has closed what it was connecting with
                on_wait()
                # The time of the attempt itself counts as a pause, so a server that is back is found within 5 s.
                stopping.wait(max(FIRST_PAUSE_SECONDS, backoff.next() - (monotonic() - began)))
            else:
                self.down_since = None
                logger.info("%s is connected again after %.1f s", self._name, monotonic() - since)
                return True
        return False

    def close(self) -> None:
        """Close it."""
        self._drop()

    def leave_to_parent(self) -> None:
        """In a forked copy: the session is the parent's, and is not held open from here."""
        if self._conn is not None:
            cut(self._conn)

    def _connect(self) -> OwnConnection:
        conn = connect_own(
            self._settings,
            name=self._name,
            statement_seconds=STATEMENT_SECONDS,
            lock_seconds=self._lock_seconds,
            goes_by_keys=self._goes_by_keys,
        )
        if not self._prepares:
            conn.prepare_threshold = None
        try:
            with self._question.asked(conn):
                if conn.begins is None:
                    ask_default_level(conn)
                if self._on_connect is not None:
                    self._on_connect(conn)
        except BaseException:
            conn.close()
            raise
        return conn

    def _drop(self) -> None:
        if self._conn is not None:
            self.sockets_lost += not self._conn.has_its_socket
            self._conn.close()
            self._conn = None
