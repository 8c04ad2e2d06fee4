"""A connection that one thread owns and that comes back by itself: claimer, settler and keeper have one each.

`run` raises psycopg.OperationalError while the server is away; `recover` waits, with growing pauses, until it is
back or the owner stops. Nothing is retried here: only the owner knows whether its operation may be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg import Connection

from commandbus.clock import monotonic
from commandbus.db.drive import OwnConnection, Runnable, run
from commandbus.db.pool import check_conninfo, connection_kwargs
from commandbus.logger import safe_logger
from commandbus.settings import Settings

T = TypeVar("T")
logger = safe_logger("commandbus.worker")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
CONNECT_TIMEOUT_SECONDS = 10
REFUSED_PAUSE_SECONDS = 1.0


def is_passing(error: psycopg.Error) -> bool:
    """May the same statement succeed later? (Limits such as the server's stack depth do not pass.)"""
    limits = (psycopg.errors.StatementTooComplex, psycopg.errors.ProgramLimitExceeded)
    return isinstance(error, psycopg.OperationalError) and not isinstance(error, limits)


class Link:
    """One connection, one thread."""

    def __init__(
        self, settings: Settings, *, name: str, on_connect: Callable[[Connection[Any]], None] | None = None
    ) -> None:
        self._settings = settings
        self._name = name
        self._on_connect = on_connect
        self._conn: OwnConnection | None = None
        self.is_down = False

    @property
    def conn(self) -> OwnConnection:
        """The connection; made on first use."""
        if self._conn is None or self._conn.closed:
            self._conn = self._connect()
        return self._conn

    def run(self, operation: Runnable[T]) -> T:
        """Run an operation on it."""
        return run(self.conn, operation)

    def conn_is_lost(self) -> bool:
        """Was the last error the connection's end, rather than the statement's?"""
        return self._conn is None or self._conn.closed or self._conn.broken

    def recover(
        self, stopping: threading.Event, error: psycopg.Error, on_wait: Callable[[], None] = lambda: None
    ) -> bool:
        """Get over an operational error: connect again, or give the server (a full disk, a deadlock) a moment.

        `on_wait` is called after every attempt to connect that failed.
        """
        if self.conn_is_lost():
            return self.restore(stopping, error, on_wait)
        logger.error("%s was refused by the database, trying again: %s", self._name, str(error).strip())
        return not stopping.wait(REFUSED_PAUSE_SECONDS)

    def restore(
        self, stopping: threading.Event, error: Exception, on_wait: Callable[[], None] = lambda: None
    ) -> bool:
        """Connect again, however long it takes; False if the owner was told to stop first."""
        self._drop()
        if not self.is_down:
            logger.warning("%s lost the database, reconnecting: %s", self._name, str(error).strip())
        self.is_down = True
        pause, since = FIRST_PAUSE_SECONDS, monotonic()
        while not stopping.is_set():
            try:
                self._conn = self._connect()
            except psycopg.Error:
                on_wait()
                stopping.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            else:
                self.is_down = False
                logger.info("%s is connected again after %.1f s", self._name, monotonic() - since)
                return True
        return False

    def close(self) -> None:
        """Close it."""
        self._drop()

    def _connect(self) -> OwnConnection:
        kwargs = connection_kwargs(self._settings, name=self._name)
        conn = OwnConnection.connect(
            check_conninfo(self._settings.database_url), connect_timeout=CONNECT_TIMEOUT_SECONDS, **kwargs
        )
        if self._on_connect is not None:
            self._on_connect(conn)
        return conn

    def _drop(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None
