"""The connections that handlers use: one pool, one budget, for sync and async handlers alike.

A handler that never asks holds none; together they hold no more than there are slots. Async handlers get an
AsyncConnection around a pooled connection's libpq handle for as long as they hold it: two pools would need two
budgets, and idle connections of one kind would be lost to the other. Such a borrowed wrapper prepares no
statements, because the pooled connection keeps count of those.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool, PoolTimeout

from commandbus.db.drive import OwnConnection
from commandbus.db.pool import open_pool
from commandbus.settings import Settings


class HandlerConnections:
    """Hands out connections to handlers; opened on first use."""

    def __init__(self, settings: Settings, *, size: int, lent: ConnectionPool[Any] | None = None) -> None:
        self._settings = settings
        self._size = size
        self._lent = lent
        self._own: ConnectionPool[OwnConnection] | None = None
        self._opening = threading.Lock()

    @contextmanager
    def sync(self, *, timeout: float) -> Iterator[Connection[Any]]:
        """A connection in ordinary psycopg manner: committed at the end of the block, rolled back on an error."""
        pool = self._pool()
        conn = pool.getconn(timeout)
        habits = _habits(conn)
        try:
            conn.autocommit = False
            with conn_block(conn):
                yield conn
        finally:
            _restore(conn, habits)
            pool.putconn(conn)

    @asynccontextmanager
    async def asynchronous(self, *, timeout: float) -> AsyncIterator[AsyncConnection[Any]]:
        """The same for an async handler."""
        pool = self._pool()
        conn = await self._get_without_blocking(pool, timeout)
        try:
            conn.autocommit = False
            wrapped: AsyncConnection[Any] = AsyncConnection(conn.pgconn)
            wrapped.prepare_threshold = None
            wrapped._pool = None  # psycopg warns of what is open and in no pool
            try:
                yield wrapped
            except BaseException:
                with suppress(psycopg.Error):  # a lost connection has rolled back; the handler's error matters
                    await wrapped.rollback()
                raise
            else:
                if not wrapped.closed:
                    await wrapped.commit()
        finally:
            _restore(conn, {})
            pool.putconn(conn)

    def close(self) -> None:
        """Close what was opened here."""
        if self._own is not None:
            self._own.close(timeout=1)

    def _pool(self) -> ConnectionPool[Any]:
        if self._lent is not None:
            return self._lent
        if self._own is None:
            with self._opening:
                if self._own is None:
                    self._own = open_pool(self._settings, name="handlers", max_size=self._size)
        return self._own

    @staticmethod
    async def _get_without_blocking(pool: ConnectionPool[Any], timeout: float) -> Connection[Any]:
        try:
            idle: Connection[Any] = pool.getconn(timeout=0)  # there is one most of the time
            return idle
        except PoolTimeout:
            pass
        asking = asyncio.get_running_loop().run_in_executor(None, pool.getconn, timeout)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The thread goes on waiting; whatever it gets must find its way back.
            asking.add_done_callback(partial(_return_late, pool))
            raise


def _return_late(pool: ConnectionPool[Any], asked: asyncio.Future[Connection[Any]]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        pool.putconn(asked.result())


@contextmanager
def conn_block(conn: Connection[Any]) -> Iterator[None]:
    """Commit at the end, roll back on an error; tolerate a handler that closed the connection itself."""
    try:
        yield
    except BaseException:
        with suppress(psycopg.Error):  # a lost connection has rolled back; the handler's error matters
            conn.rollback()
        raise
    else:
        if not conn.closed:
            conn.commit()


_HABITS = ("row_factory", "cursor_factory", "prepare_threshold", "isolation_level", "read_only", "deferrable")


def _habits(conn: Connection[Any]) -> dict[str, Any]:
    return {name: getattr(conn, name) for name in _HABITS}


def _restore(conn: Connection[Any], habits: dict[str, Any]) -> None:
    """Back to autocommit and its own habits, as the pool's other users expect; a handler may have changed all."""
    try:
        if not conn.closed and conn.pgconn.transaction_status != TransactionStatus.IDLE:
            conn.rollback()
        if not conn.closed:
            conn.autocommit = True
            for name, habit in habits.items():
                if getattr(conn, name) != habit:
                    setattr(conn, name, habit)
    except psycopg.Error:
        conn.close()  # the pool replaces it
