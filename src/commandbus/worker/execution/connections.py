"""The connections that handlers use: one pool, one budget, for sync and async handlers alike.

A handler that never asks for a connection holds none. All handlers together hold no more than there are slots. An
async handler gets an AsyncConnection around the libpq handle of a pooled connection, for as long as it holds it.
With two pools there would be two budgets, and idle connections of one kind would be of no use to the other. Such a
wrapper prepares no statements unless its handler asks for that; the pooled connection keeps the list of them.

Every connection is handed out with statement_timeout, lock_timeout at 80% of it and
idle_in_transaction_session_timeout. None is longer than the time until the attempt counts as stuck. `connection()`
sets them for its session, because a transaction-local value would be gone after the handler's own commit.
`transaction()` has one transaction only, so they are sent with its BEGIN, once the session is known, and its
COMMIT is sent together with the reset of the session. So a handler with one statement makes four round trips
instead of six. When the connection is returned, the session is as it was (`worker/execution/session_reset.py`).
The server also checks every two seconds whether its client still exists (client_connection_check_interval), so
that a statement of a killed process ends soon, whatever its handler did to the other timeouts. Behind PgBouncer
(no prepared statements) a session belongs to nobody: there the timeouts are those of the handler's first
transaction, and nothing is undone.

While a handler holds a connection, the attempt knows it (`Borrowed`). So its query can be canceled at the
deadline, and its database session can be terminated when it is stuck. A late cancel would hit the connection's
next owner, so the return to the pool waits for cancels that are under way. A process id alone may belong to
another session by now. So the server is asked once per connection when the session began, and both together
identify it. Behind PgBouncer a remembered session may serve another client by now. There the transaction takes an
advisory lock by which its session is found. Behind an unknown pooler (its process ids are not the server's) only
our own end is closed.

If a stuck attempt, or a thread that it left behind, does not return a connection, the pool must not miss it for
ever. The pool only counts connections: it is given a closed one instead, and opens another.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, IsolationLevel
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import tuple_row
from psycopg_pool import ConnectionPool, PoolTimeout

from commandbus.clock import monotonic
from commandbus.db.async_answers import HandlersAsyncConnection
from commandbus.db.drivers import (
    OwnAsyncConnection,
    OwnConnection,
    UnreplicatedError,
    has_rows,
    never_open,
    was_unreplicated,
)
from commandbus.db.pool import open_pool
from commandbus.errors import AttemptFencedError
from commandbus.logger import safe_logger
from commandbus.model.timeouts import SessionLimits
from commandbus.settings import Settings
from commandbus.worker.execution.attempt import NEVER, Attempt
from commandbus.worker.execution.one_transaction import OneTransaction
from commandbus.worker.execution.session_reset import (
    REMEMBER,
    Ask,
    CommitAndReset,
    Habits,
    Remembered,
    Rows,
    put_back,
)
from commandbus.worker.exhaustion import ExhaustedError, is_exhaustion

logger = safe_logger("commandbus.worker")

CHECK_INTERVAL_MS = 2000
NOTED_SECONDS: Final = 0.05
"""From how long on a wait for a connection is in the ledger of its command."""
IDLE_SECONDS: Final = 0.001
"""How long the event loop may wait for a connection that was idle a moment ago. (With 0 a pool gives none.)"""


class Borrowed:
    """A connection while an attempt holds it. `lock` guards its return against a cancel on its way.

    `started` is when its session began, in the server's microseconds; 0 as long as nobody has asked.
    """

    __slots__ = ("file", "is_lost", "is_returned", "key", "lock", "pgconn", "pid", "started", "told_since")

    def __init__(
        self,
        pid: int,
        key: int | None,
        pgconn: PGconn | None = None,
        started: int = 0,
        told_since: float | None = None,
    ) -> None:
        self.pid = pid
        self.started = started
        self.told_since = told_since  # told by a child process: its session began after this (by `boottime`)
        self.pgconn = pgconn
        self.file = -1 if pgconn is None else pgconn.socket
        self.key = key  # the key of the advisory lock by which the session is found behind PgBouncer
        self.lock = threading.Lock()
        self.is_returned = False
        self.is_lost = False

    def hang_up(self) -> None:
        """Close our side of it, so that the server rolls back what is open. For a session that cannot be
        found, because the handler has ended the transaction by which it is known."""
        with suppress(OSError, psycopg.Error):
            # Otherwise it was closed, and belongs to nobody.
            if self.pgconn is not None and self.pgconn.socket == self.file:
                with socket.socket(fileno=os.dup(self.file)) as ours:
                    ours.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """In a copy of this process: nothing that is sent here may reach the server."""
        if self.file >= 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self.file)
            os.close(nothing)


class HandlerConnections:
    """Hands out connections to handlers; opened on first use."""

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        size: int,
        lent: ConnectionPool[Any] | None = None,
        on_exhausted: Callable[[], None] = lambda: None,
        on_waited: Callable[[float], None] = lambda _: None,
        on_no_thread: Callable[[str], None] = lambda _: None,
        on_unreachable: Callable[[], None] = lambda: None,
        max_idle: float | None = None,
        on_session: Callable[[Attempt, int, int], None] | None = None,
    ) -> None:
        self._settings = settings
        self._timeouts = settings.timeouts
        self._name = name
        self._size = size
        self._lent = lent
        self._on_exhausted = on_exhausted
        self._on_waited = on_waited
        self._on_no_thread = on_no_thread
        self._on_unreachable = on_unreachable
        self._on_session = on_session  # told the session's pid and start, and 0 when the connection is back
        self._max_idle = max_idle
        self._own: ConnectionPool[OwnConnection] | None = None
        self._opening = threading.Lock()
        self._started: WeakKeyDictionary[Connection[Any], int] = WeakKeyDictionary()  # when its session began
        self._known: WeakKeyDictionary[Connection[Any], Known] = WeakKeyDictionary()
        self._askers: ThreadPoolExecutor | None = None
        self._is_pooled_elsewhere = not settings.prepared_statements

    @contextmanager
    def sync(
        self,
        attempt: Attempt,
        *,
        deadline_at: float,
        isolation: IsolationLevel | None = None,
        before_snapshot: Callable[[IsolationLevel], None] | None = None,
        one: OneTransaction | None = None,
    ) -> Iterator[Connection[Any]]:
        """A connection in ordinary psycopg manner: committed at the end of the block, rolled back on an error.

        `isolation`: of its transaction, unless the database says it. `before_snapshot` is called before the first
        statement of a transaction that keeps its snapshot. `one`: it is for one transaction, which is watched.
        """
        _refuse_fenced(attempt)
        pool, asked_at = self._pool(), monotonic()
        try:
            conn = pool.getconn(self._wait(attempt, deadline_at))
        except PoolTimeout:
            self._on_exhausted()
            raise
        finally:
            _note_wait(attempt, asked_at)
        self._on_waited(monotonic() - asked_at)
        habits = Habits(conn)
        before: Remembered | None = None
        borrowed = self._lend(attempt, conn)
        known = None if one is None else self._known.get(conn)
        ending = None if known is None else CommitAndReset()
        try:
            _refuse_fenced(attempt)
            if known is not None:
                conn.isolation_level = level = isolation or conn.isolation_level or known.level
                if before_snapshot is not None and level in SNAPSHOT_LEVELS:
                    before_snapshot(level)
            else:
                conn.autocommit = not self._is_pooled_elsewhere  # a lent pool's may not be
                if isolation is not None:
                    conn.isolation_level = isolation
                if one is not None and self._is_pooled_elsewhere:
                    one.watch(conn)  # the transaction begins here already
                before = self._set_limits(attempt, deadline_at, conn, borrowed, before_snapshot, one)
            if conn.autocommit:
                conn.autocommit = False
            if one is not None and not self._is_pooled_elsewhere:
                one.watch(conn, self._beginning(attempt, deadline_at, known))
            with conn_block(conn, ending), _ending(one):
                yield conn
        finally:
            if one is not None:
                one.release()
            self._take_back(attempt, borrowed)
            try:
                _restore(conn, habits)
                if not self._is_pooled_elsewhere and not self._is_clean(conn, ending):
                    with _closing_on_error(conn):
                        conn.autocommit = True
                        _run_all(conn, put_back(before, conn._prepared))
                        conn.autocommit = habits.autocommit
            finally:
                self._put(pool, conn, borrowed)

    @asynccontextmanager
    async def asynchronous(
        self,
        attempt: Attempt,
        *,
        deadline_at: float,
        isolation: IsolationLevel | None = None,
        before_snapshot: Callable[[IsolationLevel], Awaitable[None]] | None = None,
        one: OneTransaction | None = None,
    ) -> AsyncIterator[AsyncConnection[Any]]:
        """The same for an async handler."""
        _refuse_fenced(attempt)
        pool, asked_at = self._pool(), monotonic()
        try:
            conn = await self._get_without_blocking(attempt, pool, self._wait(attempt, deadline_at))
        except PoolTimeout:
            self._on_exhausted()
            raise
        finally:
            _note_wait(attempt, asked_at)
        self._on_waited(monotonic() - asked_at)
        habits = Habits(conn)
        before: Remembered | None = None
        borrowed = self._lend(attempt, conn)
        wrapped = _wrapped(conn)
        wrapped._pool = None  # psycopg warns about a connection that is open and in no pool
        known = None if one is None else self._known.get(conn)
        ending = None if known is None else CommitAndReset()
        try:
            _refuse_fenced(attempt)
            own = isolation or conn.isolation_level
            if known is not None:
                await wrapped.set_isolation_level(level := own or known.level)
                if before_snapshot is not None and level in SNAPSHOT_LEVELS:
                    await before_snapshot(level)
            else:
                await wrapped.set_autocommit(not self._is_pooled_elsewhere)
                if own is not None:
                    await wrapped.set_isolation_level(own)
                if one is not None and self._is_pooled_elsewhere:
                    one.watch(wrapped)
                before = await self._set_limits_async(
                    attempt, deadline_at, conn, wrapped, borrowed, before_snapshot, one
                )
                if wrapped.autocommit:
                    await wrapped.set_autocommit(False)
            if one is not None and not self._is_pooled_elsewhere:
                one.watch(wrapped, self._beginning(attempt, deadline_at, known))
            try:
                with _ending(one):
                    yield wrapped
            except BaseException as error:
                with suppress(psycopg.Error):  # a lost connection has rolled back; the handler's error matters
                    await wrapped.rollback()
                _close_read_only(conn, error)
                raise
            else:
                if not wrapped.closed:
                    await _commit_async(wrapped, ending)
        finally:
            if one is not None:
                one.release()
            self._take_back(attempt, borrowed)
            try:
                _restore(conn, habits)
                if not self._is_pooled_elsewhere and not self._is_clean(conn, ending):
                    with _closing_on_error(conn):
                        await wrapped.set_autocommit(True)
                        wrapped._adapters = None  # the handler's own
                        await _run_all_async(wrapped, put_back(before, conn._prepared))
                if isinstance(conn, OwnConnection):
                    conn.planned_at = wrapped.planned_at
            finally:  # the handler may be canceled here, too
                try:
                    wrapped.answers.close()
                finally:
                    self._put(pool, conn, borrowed)

    def _set_limits(
        self,
        attempt: Attempt,
        deadline_at: float,
        conn: Connection[Any],
        borrowed: Borrowed,
        before_snapshot: Callable[[IsolationLevel], None] | None,
        one: OneTransaction | None,
    ) -> Remembered | None:
        """Give the session its limits, and learn about it. Returns what a lent one had before."""
        before: Remembered | None = None
        with Cursor(conn, row_factory=tuple_row) as cursor:  # whatever a lent pool's own are
            if self._remembers:
                before = Remembered(*_row(cursor.execute(REMEMBER, prepare=False).fetchone()))
            limits = self._limits(attempt, deadline_at, borrowed)
            found = _row(cursor.execute(_limit(borrowed), limits, prepare=self._prepares).fetchone())
            self._identify(attempt, borrowed, conn, found)
            level = conn.isolation_level or _level(found[0])
            if before_snapshot is not None and level in SNAPSHOT_LEVELS:
                Connection.rollback(conn)  # behind a pooler the transaction has begun already
                before_snapshot(level)
                if self._is_pooled_elsewhere:
                    if one is not None:
                        one.watch(conn)
                    cursor.execute(_limit(borrowed), self._limits(attempt, deadline_at, borrowed), prepare=False)
        return before

    async def _set_limits_async(
        self,
        attempt: Attempt,
        deadline_at: float,
        conn: Connection[Any],
        wrapped: OwnAsyncConnection,
        borrowed: Borrowed,
        before_snapshot: Callable[[IsolationLevel], Awaitable[None]] | None,
        one: OneTransaction | None,
    ) -> Remembered | None:
        """The same on an async connection."""
        before: Remembered | None = None
        async with AsyncCursor(wrapped, row_factory=tuple_row) as cursor:
            if self._remembers:
                before = Remembered(*_row(await (await cursor.execute(REMEMBER)).fetchone()))
            limits = self._limits(attempt, deadline_at, borrowed)
            found = _row(await (await cursor.execute(_limit(borrowed), limits)).fetchone())
            self._identify(attempt, borrowed, conn, found)
            level = wrapped.isolation_level or _level(found[0])
            if before_snapshot is not None and level in SNAPSHOT_LEVELS:
                await AsyncConnection.rollback(wrapped)  # behind a pooler the transaction has begun already
                await before_snapshot(level)
                if self._is_pooled_elsewhere:
                    if one is not None:
                        one.watch(wrapped)
                    await cursor.execute(_limit(borrowed), self._limits(attempt, deadline_at, borrowed))
        return before

    @property
    def _remembers(self) -> bool:
        """Must the session be returned as it was, because it belongs to the application?"""
        return self._lent is not None and not self._is_pooled_elsewhere

    @property
    def _prepares(self) -> bool | None:
        """Are our own statements prepared in it? Not in a session of the application."""
        return None if self._lent is None else False

    def write_off(self, borrowed: Borrowed) -> None:
        """A stuck attempt does not return this connection: its session was ended, the pool may open another."""
        with borrowed.lock:
            if borrowed.is_returned or borrowed.is_lost:
                return
            borrowed.is_lost = True
        pool: ConnectionPool[Any] | None = self._lent if self._lent is not None else self._own
        if pool is not None:
            pool.putconn(_closed_connection_of(pool))

    def wait_no_more(self, attempt: Attempt) -> None:
        """An abandoned attempt may wait for a connection on an event loop that will never go on. A connection for
        it goes back to the pool."""
        if attempt.asks is not None:
            attempt.asks.forget()

    def _put(self, pool: ConnectionPool[Any], conn: Connection[Any], borrowed: Borrowed) -> None:
        if borrowed.is_lost:
            _close(conn)  # the pool has replaced it already
        else:
            pool.putconn(conn)

    def _wait(self, attempt: Attempt, deadline_at: float) -> float:
        """How long to wait for a connection: never more than what remains of the attempt, or of its grace."""
        end = deadline_at if attempt.stop is None else attempt.stop.until
        return self._timeouts.pool_wait(None if end == NEVER else end - monotonic())

    def _limits(self, attempt: Attempt, deadline_at: float, borrowed: Borrowed) -> dict[str, Any]:
        limits = self._session_limits(attempt, deadline_at)
        return {
            "statement": str(limits.statement_timeout_ms),
            "lock": str(limits.lock_timeout_ms),
            "idle": str(limits.idle_in_transaction_session_timeout_ms),
            "check": str(CHECK_INTERVAL_MS),
            "local": self._is_pooled_elsewhere,
            "key": borrowed.key,
            "asks": borrowed.started == 0 and borrowed.key is None,
        }

    def _beginning(
        self, attempt: Attempt, deadline_at: float, known: Known | None
    ) -> Callable[[], Sequence[bytes]]:
        """What is sent with the BEGIN of a transaction: its limits, if the session does not have them."""
        if known is None:
            return tuple
        return lambda: [
            f"SET LOCAL {name} = {value}".encode()
            for name, value in self._limits_by_name(attempt, deadline_at, checks=known.checks)
        ]

    def _limits_by_name(self, attempt: Attempt, deadline_at: float, *, checks: bool) -> Iterator[tuple[str, int]]:
        limits = self._session_limits(attempt, deadline_at)
        yield "statement_timeout", limits.statement_timeout_ms
        yield "lock_timeout", limits.lock_timeout_ms
        yield "idle_in_transaction_session_timeout", limits.idle_in_transaction_session_timeout_ms
        if checks:
            yield "client_connection_check_interval", CHECK_INTERVAL_MS

    def _session_limits(self, attempt: Attempt, deadline_at: float) -> SessionLimits:
        end = attempt.stop.until if attempt.stop is not None else deadline_at + self._timeouts.cancel_grace
        return self._timeouts.session_limits(None if end == NEVER else end - monotonic())

    def _is_clean(self, conn: Connection[Any], ending: CommitAndReset | None) -> bool:
        """Has the end of the transaction reset the session, too?"""
        if ending is None or not ending.is_clean(conn._prepared):
            return False
        self._known[conn] = self._known[conn]._replace(level=_level(ending.level))
        return True

    def _lend(self, attempt: Attempt, conn: Connection[Any]) -> Borrowed:
        key = advisory_key(attempt) if self._is_pooled_elsewhere else None
        borrowed = Borrowed(conn.pgconn.backend_pid, key, conn.pgconn, self._started.get(conn, 0))
        attempt.extras.borrowed = borrowed
        self._show_session(attempt, borrowed)
        return borrowed

    def _show_session(self, attempt: Attempt, borrowed: Borrowed) -> None:
        if self._on_session is not None:
            self._on_session(attempt, borrowed.pid, borrowed.started)

    def _identify(self, attempt: Attempt, borrowed: Borrowed, conn: Connection[Any], found: Sequence[Any]) -> None:
        """The server has said which process serves this connection. If libpq knows another process id, there is a
        pooler."""
        if self._lent is None and not self._is_pooled_elsewhere:
            self._known[conn] = Known(_level(found[0]), found[4] is not None)
        if borrowed.started:
            return
        pid, started = found[-2:]
        if pid == borrowed.pid and started is not None:
            self._started[conn] = borrowed.started = started
            self._show_session(attempt, borrowed)

    def _take_back(self, attempt: Attempt, borrowed: Borrowed) -> None:
        with borrowed.lock:  # wait for a cancel that is on its way, so that it does not hit the next owner
            borrowed.is_returned = True
        attempt.extras.borrowed = None
        if self._on_session is not None:
            self._on_session(attempt, 0, 0)

    def close(self) -> None:
        """Close what was opened here."""
        if self._own is not None:
            self._own.close(timeout=1)
        if self._askers is not None:
            self._askers.shutdown(wait=False, cancel_futures=True)

    def _pool(self) -> ConnectionPool[Any]:
        if self._lent is not None:
            return self._lent
        if self._own is None:
            with self._opening:
                if self._own is None:
                    self._own = self._open()
        return self._own

    def _open(self) -> ConnectionPool[OwnConnection]:
        try:
            return open_pool(
                self._settings,
                name=self._name,
                max_size=self._size,
                reconnect_failed=lambda _: self._on_unreachable(),
                max_idle=self._max_idle,
            )
        except RuntimeError as error:
            if not is_exhaustion(error):
                raise
            self._on_no_thread(f"the pool of handlers' connections could not be opened ({error})")
            raise ExhaustedError(f"the pool of handlers' connections could not be opened: {error}") from error

    async def _get_without_blocking(
        self, attempt: Attempt, pool: ConnectionPool[Any], timeout: float
    ) -> Connection[Any]:
        if pool.get_stats().get("pool_available"):  # there is one most of the time
            with suppress(PoolTimeout):  # another thread was faster
                idle: Connection[Any] = pool.getconn(IDLE_SECONDS)
                return idle
        if self._askers is None:
            # Not the loop's default threads: handlers use those, and may have left all of them hanging.
            most = 2 * self._settings.concurrency
            self._askers = ThreadPoolExecutor(most, thread_name_prefix=f"{self._name}-asker")
        question = ConnectionRequest(pool, timeout)
        try:
            asked = self._askers.submit(question)
        except RuntimeError as error:
            question.forget()  # it is in the queue all the same
            self._on_no_thread(f"no thread can wait for a connection ({error})")
            raise ExhaustedError(f"no thread can wait for a connection: {error}") from error
        attempt.extras.asks = question
        try:
            await asyncio.wrap_future(asked)
            if (conn := question.take()) is not None:
                return conn
            raise _fenced(attempt)
        finally:
            question.forget()  # if nobody took it, it is returned, even if the thread still waits for it
            attempt.extras.asks = None


class ConnectionRequest:
    """Waits for a connection on a thread of its own. The connection goes to the attempt, or back to the pool."""

    def __init__(self, pool: ConnectionPool[Any], timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout
        self._lock = threading.Lock()
        self._found: Connection[Any] | None = None
        self._is_over = False

    def __call__(self) -> None:
        """On that thread."""
        if self._is_over:
            return  # nobody wants it any more
        conn: Connection[Any] = self._pool.getconn(self._timeout)
        with self._lock:
            if not self._is_over:
                self._found = conn
                return
        self._pool.putconn(conn)

    def take(self) -> Connection[Any] | None:
        """What was found; None if it was given back."""
        with self._lock:
            self._is_over = True
            found, self._found = self._found, None
            return found

    def forget(self) -> None:
        """Nobody wants it any more."""
        if (found := self.take()) is not None:
            self._pool.putconn(found)


class Known(NamedTuple):
    """A session of our own pool that has served a handler: its next transaction's limits can go with the BEGIN."""

    level: IsolationLevel  # its default
    checks: bool  # can the server check whether the client is still there?


SNAPSHOT_LEVELS: Final = (IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE)
"""A transaction of these sees the database as it was at its first statement, and cannot write to what changed."""


def _level(name: str) -> IsolationLevel:
    """The level that a setting of the server names."""
    return IsolationLevel[name.upper().replace(" ", "_")]


_LIMIT_KNOWN = b"""SELECT pg_catalog.current_setting('default_transaction_isolation'),
    pg_catalog.set_config('statement_timeout', %(statement)s, %(local)s),
    pg_catalog.set_config('lock_timeout', %(lock)s, %(local)s),
    pg_catalog.set_config('idle_in_transaction_session_timeout', %(idle)s, %(local)s),
    CASE WHEN pg_catalog.version() LIKE '%%linux%%'
         THEN pg_catalog.set_config('client_connection_check_interval', %(check)s, %(local)s) END"""
_LIMIT = (
    _LIMIT_KNOWN
    + b""",
    CASE WHEN %(key)s::bigint IS NOT NULL THEN pg_catalog.pg_advisory_xact_lock(%(key)s::bigint) END,
    CASE WHEN %(asks)s THEN pg_catalog.pg_backend_pid() END,
    CASE WHEN %(asks)s THEN (SELECT (extract(epoch FROM backend_start) * 1000000::numeric)::bigint
                               FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid())) END"""
)


def _limit(borrowed: Borrowed) -> bytes:
    """Sets the timeouts. Asking which session serves us takes a quarter of the time, so it is asked only once."""
    return _LIMIT_KNOWN if borrowed.started and borrowed.key is None else _LIMIT


def _run_all(conn: Connection[Any], asks: Generator[Ask, Rows, None]) -> None:
    """Run one statement after the other, and send the rows of each to the generator."""
    with Cursor(conn, row_factory=tuple_row) as cursor, suppress(StopIteration):
        statement, values = next(asks)
        while True:
            cursor.execute(statement, values, prepare=False)
            statement, values = asks.send(cursor.fetchall() if has_rows(cursor.pgresult) else [])


async def _run_all_async(conn: AsyncConnection[Any], asks: Generator[Ask, Rows, None]) -> None:
    async with AsyncCursor(conn, row_factory=tuple_row) as cursor:
        with suppress(StopIteration):
            statement, values = next(asks)
            while True:
                await cursor.execute(statement, values, prepare=False)
                statement, values = asks.send(await cursor.fetchall() if has_rows(cursor.pgresult) else [])


def _row(row: tuple[Any, ...] | None) -> tuple[Any, ...]:
    assert row is not None  # noqa: S101 - a SELECT without FROM has one
    return row


def _wrapped(conn: Connection[Any]) -> HandlersAsyncConnection:
    """The same session for async code. Both share the record of prepared statements and the age of plans."""
    wrapped = HandlersAsyncConnection(conn.pgconn)
    wrapped._prepared = conn._prepared
    wrapped.prepare_threshold = conn.prepare_threshold if isinstance(conn, OwnConnection) else None
    wrapped.planned_at = conn.planned_at if isinstance(conn, OwnConnection) else 0.0
    return wrapped


def _closed_connection_of(pool: ConnectionPool[Any]) -> Connection[Any]:
    """A connection that was never open, for a pool that takes it for one of its own and replaces it."""
    closed: Connection[Any] = Connection(never_open())
    closed._pool = pool
    return closed


def _close(conn: Connection[Any]) -> None:
    """Close it, even if its pool would rather have it back (`close_returns`)."""
    pool, conn._pool = conn._pool, None
    conn.close()
    conn._pool = pool


def _note_wait(attempt: Attempt, asked_at: float) -> None:
    """It has waited for a connection: a wait that a person would notice is in the ledger of its command."""
    now = monotonic()
    if now - asked_at >= NOTED_SECONDS:
        attempt.note_span("connection", asked_at, now)


def advisory_key(attempt: Attempt) -> int:
    """The key of the lock by which this attempt's session is found behind PgBouncer."""
    mark = f"commandbus {attempt.domain} {attempt.msg_id} {attempt.read_ct}".encode()
    return int.from_bytes(hashlib.blake2b(mark, digest_size=8).digest(), "big", signed=True)


def _refuse_fenced(attempt: Attempt) -> None:
    if attempt.is_fenced:
        raise _fenced(attempt)


def _fenced(attempt: Attempt) -> AttemptFencedError:
    return AttemptFencedError(
        f"attempt number {attempt.number} of command {attempt.command_id!r} has ended or was given up: it gets no "
        f"connection"
    )


@contextmanager
def _closing_on_error(conn: Connection[Any]) -> Iterator[None]:
    """A connection that cannot be put right is closed; the pool replaces it."""
    try:
        yield
    except BaseException as error:
        _close(conn)
        if not isinstance(error, psycopg.Error):
            raise


@contextmanager
def _ending(one: OneTransaction | None) -> Iterator[None]:
    """At the end of the block commit and rollback are ours."""
    try:
        yield
    finally:
        if one is not None:
            one.release()


@contextmanager
def conn_block(conn: Connection[Any], ending: CommitAndReset | None) -> Iterator[None]:
    """Commit at the end, roll back on an error; tolerate a handler that closed the connection itself."""
    try:
        yield
    except BaseException as error:
        with suppress(psycopg.Error):  # a lost connection has rolled back; the handler's error matters
            conn.rollback()
        _close_read_only(conn, error)
        raise
    else:
        if conn.closed:
            return
        if ending is None:
            conn.commit()
        else:
            with conn.lock:
                conn.wait(ending.commit(conn))
        _check_replicated(conn)


async def _commit_async(conn: AsyncConnection[Any], ending: CommitAndReset | None) -> None:
    if ending is None:
        await conn.commit()
    else:
        async with conn.lock:
            await conn.wait(ending.commit(conn))
    _check_replicated(conn)


def _check_replicated(conn: Connection[Any] | AsyncConnection[Any]) -> None:
    """The commit stands on this server, but it is not acknowledged: a failover now would lose it."""
    if was_unreplicated(conn):
        raise UnreplicatedError(
            "the handler's commit was canceled while it waited for the synchronous standby: it is not "
            "acknowledged; it stands on this server, but a failover now would lose it"
        )


def _close_read_only(conn: Connection[Any], error: BaseException) -> None:
    """A session that began while the server was read-only may stay so, and the next handler would fail."""
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        _close(conn)


def _restore(conn: Connection[Any], habits: Habits) -> None:
    """Back to its own habits, as the pool's other users expect."""
    try:
        if not conn.closed and conn.pgconn.transaction_status != TransactionStatus.IDLE:
            conn.rollback()
        if not conn.closed:
            habits.restore(conn)
    except psycopg.Error:
        _close(conn)  # the pool replaces it
