"""The pools of a bus: they say why there is no connection, and say it at once if waiting would not help.

psycopg's pool connects on its own threads, tries again with growing pauses, and raises only PoolTimeout for
callers that wait. A bus wants the server's reason. If nobody listens at the address, or a person must repair
something (a password, a database that does not exist), callers are told at once. For transient trouble (a server
that starts, too many connections, a host that does not answer) they wait up to the timeout, and are told the
reason then.

A pool tries to connect only while somebody waits. So the next caller finds out at once that the server is back.

A caller gets the connection that was used last. psycopg's pools give the one that was idle longest, so a lone
sender would use all connections in turn, and what each server process has in its caches would be old: a send took
75 µs more of the server's CPU with eight connections than with one.
"""

from __future__ import annotations

import re
from typing import Any, Final

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from psycopg_pool.base import AttemptWithBackoff

from commandbus.clock import monotonic
from commandbus.db.drivers import OwnAsyncConnection, OwnConnection
from commandbus.db.pool import async_pool_options, cut, pool_options
from commandbus.db.wait_for_server import passes_by_itself, reason_of
from commandbus.errors import DatabaseUnavailableError
from commandbus.model.durations import format_seconds
from commandbus.settings import Settings

TRY_AGAIN_SECONDS: Final = 0.25
_REFUSED: Final = re.compile("Connection refused|No such file or directory|Name or service not known")
_ONE_OF_SEVERAL: Final = re.compile(r"^- host: ", re.MULTILINE)


def is_hopeless(error: BaseException) -> bool:
    """Is waiting useless? Nobody listens at any of the hosts, or a person must repair something."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    if not passes_by_itself(error):
        return True
    found, hosts = _ONE_OF_SEVERAL.split(str(error)), 1
    if len(found) > hosts:  # psycopg lists all addresses after the error of the last one
        return all(_REFUSED.search(each) for each in found[hosts:])
    return _REFUSED.search(str(error)) is not None


def unavailable(error: BaseException) -> DatabaseUnavailableError:
    """The error for a failed connect."""
    return DatabaseUnavailableError(f"the database cannot be reached: {reason_of(error)}")


class _WhileWanted(AttemptWithBackoff):
    """Try again soon, and only while somebody waits."""

    def __init__(self, pool: BusPool | AsyncBusPool) -> None:
        super().__init__(timeout=0.0)
        self._pool = pool

    def update_delay(self, now: float) -> None:  # noqa: ARG002 - psycopg's signature
        self.delay = TRY_AGAIN_SECONDS

    def time_to_give_up(self, now: float) -> bool:  # noqa: ARG002
        return not self._pool.is_wanted


class BusPool(ConnectionPool[OwnConnection]):
    """The pool of a CommandBus."""

    failure: BaseException | None = None  # the error of the last attempt to connect
    is_patient = False  # the embedded server is restarted if it dies, so callers wait for it

    @property
    def is_wanted(self) -> bool:
        """Does anybody wait? psycopg keeps those who have given up in its list."""
        return any(each.conn is None and each.error is None for each in list(self._waiting))

    def _get_ready_connection(self, timeout: float | None) -> OwnConnection | None:
        self._pool.rotate()  # the one that was used last
        return super()._get_ready_connection(timeout)

    def take(self, seconds: float | None = None) -> OwnConnection:
        """A connection; DatabaseUnavailableError says why there is none."""
        try:
            return self.getconn(seconds)
        except psycopg.OperationalError as error:  # PoolTimeout
            raise no_connection(self, error, seconds) from error

    def _connect(self, timeout: float | None = None) -> OwnConnection:
        try:
            conn = super()._connect(timeout)
        except Exception as error:
            self.failure = error
            if not self.is_patient and is_hopeless(error):
                self._fail_all(error)
            raise
        self.failure = None
        return conn

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for each in waiting:
            each.fail(unavailable(error))

    def _add_connection(self, attempt: AttemptWithBackoff | None, growing: bool = False) -> None:  # noqa: FBT001
        super()._add_connection(attempt or _WhileWanted(self), growing)
        with self._lock:  # another caller may have come while this one was giving up, and rely on it
            if self.is_wanted:
                self._maybe_grow_pool()

    def _getconn_with_check_loop(self, deadline: float) -> OwnConnection:
        """As psycopg's, but without pauses: after a restart each idle connection is found broken once."""
        while True:
            conn = self._getconn_unchecked(deadline - monotonic())
            try:
                self._check_connection(conn)
            except BaseException as error:
                self._putconn(conn, from_getconn=True)
                if not isinstance(error, Exception):
                    raise
            else:
                return conn


class AsyncBusPool(AsyncConnectionPool[OwnAsyncConnection]):
    """The pool of an AsyncCommandBus."""

    failure: BaseException | None = None
    is_patient = False

    @property
    def is_wanted(self) -> bool:
        """Does anybody wait?"""
        return any(each.conn is None and each.error is None for each in list(self._waiting))

    async def _get_ready_connection(self, timeout: float | None) -> OwnAsyncConnection | None:
        self._pool.rotate()
        return await super()._get_ready_connection(timeout)

    async def take(self, seconds: float | None = None) -> OwnAsyncConnection:
        """A connection; DatabaseUnavailableError says why there is none."""
        try:
            return await self.getconn(seconds)
        except psycopg.OperationalError as error:
            raise no_connection(self, error, seconds) from error

    async def _connect(self, timeout: float | None = None) -> OwnAsyncConnection:
        try:
            conn = await super()._connect(timeout)
        except Exception as error:
            self.failure = error
            if not self.is_patient and is_hopeless(error):
                await self._fail_all(error)
            raise
        self.failure = None
        return conn

    async def _fail_all(self, error: Exception) -> None:
        async with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for each in waiting:
            await each.fail(unavailable(error))

    async def _add_connection(self, attempt: AttemptWithBackoff | None, growing: bool = False) -> None:  # noqa: FBT001
        await super()._add_connection(attempt or _WhileWanted(self), growing)
        async with self._lock:
            if self.is_wanted:
                self._maybe_grow_pool()

    async def _getconn_with_check_loop(self, deadline: float) -> OwnAsyncConnection:
        while True:
            conn = await self._getconn_unchecked(deadline - monotonic())
            try:
                await self._check_connection(conn)
            except BaseException as error:
                await self._putconn(conn, from_getconn=True)
                if not isinstance(error, Exception):
                    raise
            else:
                return conn


def make_bus_pool(settings: Settings, *, max_size: int, is_patient: bool) -> BusPool:
    """A pool, not opened yet. `is_patient`: an unreachable server comes back by itself."""
    options = pool_options(settings, name="bus", max_size=max_size)
    pool = BusPool(**options | {"open": False, "reconnect_timeout": 0.0})
    pool.is_patient = is_patient
    return pool


def make_async_bus_pool(settings: Settings, *, max_size: int, is_patient: bool, name: str = "bus") -> AsyncBusPool:
    """The same, to be opened on the loop that uses it. `name` is in the names of its sessions."""
    options = async_pool_options(settings, name=name, max_size=max_size)
    pool = AsyncBusPool(**options | {"open": False, "reconnect_timeout": 0.0})
    pool.is_patient = is_patient
    return pool


def no_connection(
    pool: ConnectionPool[Any] | AsyncConnectionPool[Any], error: BaseException, seconds: float | None = None
) -> DatabaseUnavailableError:
    """The error for a pool that gave no connection in time."""
    waited = format_seconds(pool.timeout if seconds is None else max(0.0, seconds))
    failure = getattr(pool, "failure", None)
    if failure is not None:
        return DatabaseUnavailableError(f"the database could not be reached for {waited}: {reason_of(failure)}")
    stats = pool.get_stats()
    failed = stats.get("connections_errors", 0)
    if failed and not isinstance(pool, BusPool | AsyncBusPool):
        return DatabaseUnavailableError(
            f"the pool that was lent to this bus gave no connection for {waited}: {failed} of its attempts to "
            f"connect failed (the logger psycopg.pool says why), it has {stats.get('pool_size', 0)} connections "
            f"({error})"
        )
    return DatabaseUnavailableError(
        f"no connection became free for {waited}: all {stats.get('pool_size', 0)} of the pool are in use, and "
        f"{stats.get('requests_waiting', 0)} wait for one; give it more (COMMANDBUS_POOL_MAX_SIZE, or max_size of "
        f"the pool that was lent), or keep them for shorter"
    )


# --- after a fork ---------------------------------------------------------------------------------------------

_left_behind: list[object] = []
"""In a forked copy: what is its parent's. A pool that is collected would wait for threads that are not here."""


def leave_to_parent(pool: BusPool | AsyncBusPool) -> None:
    """In a forked process: never use this pool, and keep none of its idle connections open."""
    idle: list[Any] = list(pool._pool)
    for conn in idle:
        cut(conn)
    pool._closed = True
    _left_behind.append(pool)


def keep(thing: object) -> None:
    """In a forked copy: never collect this."""
    _left_behind.append(thing)
