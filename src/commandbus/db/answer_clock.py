"""The answer clock: a connection whose server has not answered for too long is cut, whatever TCP believes.

If a host vanishes silently, a NAT entry is lost, or a pooler freezes while its kernel still acknowledges, a thread
waits in a read that never ends. One thread per process watches every connection of ours that waits for an answer.
After the timeout of the statement it asks the server to cancel the statement. If there is still no answer, it
shuts the socket down, and the waiting thread gets the error that every lost connection gives.

The clock itself never waits: the cancel request is sent on a separate thread. It looks at the very moment when a
question is due, and every two seconds for new ones. Those have more time than that, or wake it (`run_until`).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import psycopg

from commandbus.clock import monotonic
from commandbus.db.drivers import (
    AnyAsyncConnection,
    AnyConnection,
    OwnConnection,
    Runnable,
    run,
    run_async,
)
from commandbus.errors import DatabaseUnavailableError
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.database")
T = TypeVar("T")

TICK_SECONDS: Final = 2.0
LATER_SECONDS: Final = 0.001  # a look that comes a moment too early would find nothing to do
CANCEL_TIMEOUT_SECONDS: Final = 3.0


class PendingAnswer:
    """What one connection is waiting for. Written by its owner, read by the clock."""

    def __init__(self, name: str, *, cancel_after: float, cut_after: float) -> None:
        self.name = name
        self.cancel_after = cancel_after
        self.cut_after = cut_after
        self.asked_at = 0.0  # 0: no question is open
        self.ended_at = 0.0  # when the last wait for an answer ended, well or not
        self.conn: AnyConnection | AnyAsyncConnection | None = None
        self.was_cut = False
        self._canceled = False
        self._lock = threading.Lock()
        _clock.add(self)

    @contextmanager
    def asked(self, conn: AnyConnection | AnyAsyncConnection) -> Iterator[None]:
        """The server must answer within this block."""
        with self._lock:
            self.conn, self._canceled, self.was_cut = conn, False, False
            self.asked_at = monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.ended_at = monotonic()
                self.asked_at, self.conn = 0.0, None

    @property
    def waits_for(self) -> float:
        """Seconds since the unanswered statement was sent; 0 if there is none."""
        asked_at = self.asked_at
        return monotonic() - asked_at if asked_at else 0.0

    @property
    def due(self) -> float:
        """When the clock must look at it (monotonic)."""
        with self._lock:
            if not self.asked_at or self.was_cut:
                return math.inf
            return self.asked_at + (self.cut_after if self._canceled else self.cancel_after) + LATER_SECONDS

    def check(self, now: float) -> None:
        """Called by the clock."""
        with self._lock:
            conn, asked_at = self.conn, self.asked_at
            if conn is None or not asked_at or now - asked_at < self.cancel_after:
                return
            if now - asked_at >= self.cut_after:
                if not self.was_cut:
                    self.was_cut = True
                    text = "%s has had no answer for %.3g s: its connection is cut"
                    logger.warning(text, self.name, now - asked_at)
                    _cut(conn)
                return
            if self._canceled:
                return
            self._canceled = True
        threading.Thread(target=_cancel, args=(conn,), name="commandbus-cancel", daemon=True).start()


class NoAnswerError(DatabaseUnavailableError):
    """The server has not answered in time, and its connection was cut. It may have done what it was asked."""


def run_until(until: float, conn: AnyConnection, operation: Runnable[T], *, commits: bool = False) -> T:
    """Run an operation until this moment (monotonic): then the connection is cut. `commits`: end its transaction,
    too."""
    with _answered_until(until, conn):
        result = run(conn, operation)
        if commits and not conn.autocommit:
            conn.commit()
        return result


async def run_until_async(
    until: float, conn: AnyAsyncConnection, operation: Runnable[T], *, commits: bool = False
) -> T:
    """The same on an async connection."""
    with _answered_until(until, conn):
        result = await run_async(conn, operation)
        if commits and not conn.autocommit:
            await conn.commit()
        return result


@contextmanager
def _answered_until(until: float, conn: AnyConnection | AnyAsyncConnection) -> Iterator[None]:
    began = monotonic()
    seconds = max(0.0, until - began)
    question = PendingAnswer("a call of the bus", cancel_after=seconds, cut_after=seconds)
    try:
        with question.asked(conn):
            _clock.look_by(question.due)
            yield
        if question.was_cut:  # it answered at the last moment
            conn.pgconn.finish()
    except psycopg.OperationalError as error:
        if not question.was_cut:
            raise
        raise NoAnswerError(
            f"the database has not answered for {monotonic() - began:.3g} s; what it was asked to do may have "
            f"been done"
        ) from error


def _cancel(conn: AnyConnection) -> None:
    with contextlib.suppress(psycopg.Error, OSError):
        conn.cancel_safe(timeout=CANCEL_TIMEOUT_SECONDS)


def _cut(conn: AnyConnection | AnyAsyncConnection) -> None:
    """Ends every read and write of the socket; its owner still has to close it."""
    if isinstance(conn, OwnConnection) and not conn.has_its_socket:
        return  # its owner notices that itself
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(conn.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


class _Clock:
    """One thread per process, started with the first question."""

    def __init__(self) -> None:
        self._questions: weakref.WeakSet[PendingAnswer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._sooner = threading.Condition()
        self._next_look = 0.0

    def look_by(self, moment: float) -> None:
        """Wake the clock if it would look at this question too late."""
        with self._sooner:
            if moment < self._next_look:
                self._next_look = moment
                self._sooner.notify()

    def add(self, question: PendingAnswer) -> None:
        with self._lock:
            self._questions.add(question)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._tick, name="commandbus-answers", daemon=True)
                self._thread.start()

    def forget_all(self) -> None:
        """In a forked copy: neither the thread nor the connections are its own."""
        self.__init__()  # type: ignore[misc]

    def _tick(self) -> None:
        while True:
            self._sleep()
            with self._lock:
                questions = list(self._questions)
            for question in questions:
                try:
                    question.check(monotonic())
                except Exception:
                    logger.exception("the answer clock could not look at %s", question.name)

    def _sleep(self) -> None:
        with self._sooner:
            with self._lock:
                due = [question.due for question in self._questions]
            self._next_look = min([monotonic() + TICK_SECONDS, *due])
            while (seconds := self._next_look - monotonic()) > 0:
                self._sooner.wait(seconds)


_clock = _Clock()
os.register_at_fork(after_in_child=_clock.forget_all)
