"""The connections that handlers use: one pool, one budget, for sync and async handlers alike.

A handler that never asks holds none; together they hold no more than there are slots. Async handlers get an
AsyncConnection around a pooled connection's libpq handle for as long as they hold it: two pools would need two
budgets, and idle connections of one kind would be lost to the other. Such a borrowed wrapper prepares no
statements, because the pooled connection keeps count of those.

Every connection is handed out with the worker's statement_timeout, and lock_timeout at 80% of it, for its session
(a transaction-local value would be gone after the handler's own commit). When it comes back, the session is as it
was: of our own pool everything is reset, of a lent one what we set. Behind PgBouncer (no prepared statements) a
session belongs to nobody: there the limits are those of the handler's first transaction, and nothing is undone.
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
        limits = settings.timeouts.session_limits(None)
        self._is_pooled_elsewhere = not settings.prepared_statements
        self._limits: dict[str, Any] = {
            "statement": str(limits.statement_timeout_ms),
            "lock": str(limits.lock_timeout_ms),
            "local": self._is_pooled_elsewhere,
        }

    @contextmanager
    def sync(self, *, timeout: float) -> Iterator[Connection[Any]]:
        """A connection in ordinary psycopg manner: committed at the end of the block, rolled back on an error."""
        pool = self._pool()
        conn = pool.getconn(timeout)
        habits = _habits(conn)
        before: dict[str, Any] = {}
        try:
            conn.autocommit = not self._is_pooled_elsewhere  # a lent pool's may not be
            before = _named(conn.execute(_LIMIT, self._limits, prepare=False).fetchone())
            if conn.autocommit:
                conn.autocommit = False
            with conn_block(conn):
                yield conn
        finally:
            _restore(conn, habits)
            if not self._is_pooled_elsewhere:
                with _closing_on_error(conn):
                    conn.autocommit = True
                    conn.execute(*self._undo(before), prepare=False)
                    conn.autocommit = habits["autocommit"]
            pool.putconn(conn)

    @asynccontextmanager
    async def asynchronous(self, *, timeout: float) -> AsyncIterator[AsyncConnection[Any]]:
        """The same for an async handler."""
        pool = self._pool()
        conn = await self._get_without_blocking(pool, timeout)
        habits = _habits(conn)
        before: dict[str, Any] = {}
        wrapped: AsyncConnection[Any] = AsyncConnection(conn.pgconn)
        wrapped.prepare_threshold = None
        wrapped._pool = None  # psycopg warns of what is open and in no pool
        try:
            await wrapped.set_autocommit(not self._is_pooled_elsewhere)
            before = _named(await (await wrapped.execute(_LIMIT, self._limits)).fetchone())
            if not self._is_pooled_elsewhere:
                await wrapped.set_autocommit(False)
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
            _restore(conn, habits)
            if not self._is_pooled_elsewhere:
                with _closing_on_error(conn):
                    await wrapped.set_autocommit(True)
                    await wrapped.execute(*self._undo(before))
            pool.putconn(conn)

    def _undo(self, before: dict[str, Any]) -> tuple[bytes, dict[str, Any] | None]:
        """What makes the session as it was: everything anew in our own pool, only our limits in a lent one."""
        return (_RESET, None) if self._lent is None else (_LIMIT, before)

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


# The values from before come first: a target list is worked off from left to right.
_LIMIT = b"""SELECT current_setting('statement_timeout'), current_setting('lock_timeout'),
    set_config('statement_timeout', %(statement)s, %(local)s), set_config('lock_timeout', %(lock)s, %(local)s)"""
_RESET = b"RESET ALL; UNLISTEN *; SELECT pg_advisory_unlock_all()"


def _named(row: Any) -> dict[str, Any]:
    found = tuple(row.values()) if isinstance(row, dict) else tuple(row)  # a lent pool has its own row factory
    return {"statement": found[0], "lock": found[1], "local": False}


@contextmanager
def _closing_on_error(conn: Connection[Any]) -> Iterator[None]:
    """A connection that cannot be put right is closed; the pool replaces it."""
    try:
        yield
    except BaseException as error:
        conn.close()
        if not isinstance(error, psycopg.Error):
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


_HABITS = (
    "autocommit",
    "row_factory",
    "cursor_factory",
    "prepare_threshold",
    "isolation_level",
    "read_only",
    "deferrable",
)


def _habits(conn: Connection[Any]) -> dict[str, Any]:
    return {name: getattr(conn, name) for name in _HABITS}


def _restore(conn: Connection[Any], habits: dict[str, Any]) -> None:
    """Back to its own habits, as the pool's other users expect; a handler may have changed all."""
    try:
        if not conn.closed and conn.pgconn.transaction_status != TransactionStatus.IDLE:
            conn.rollback()
        if not conn.closed:
            for name, habit in habits.items():
                if getattr(conn, name) != habit:
                    setattr(conn, name, habit)
    except psycopg.Error:
        conn.close()  # the pool replaces it
