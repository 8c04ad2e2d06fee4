"""The two drivers: they run an operation's statements on a connection, sync or async. Nothing else differs.

A connection of our own is in autocommit mode: a one-statement operation is one round trip, an atomic one gets a
transaction. A connection lent by the caller (`conn=`) keeps its transaction: on one that is not in autocommit
mode nothing is begun or committed here, so that the caller's rollback takes our rows with it.

The server keeps the plans of prepared statements. It made them for the tables as they were then, and makes new
ones only after an ANALYZE. So a connection of ours drops plans that are older than PLAN_SECONDS, unless the
statement needs no other plan than the one that it has (ADR 15).

A connection of ours that turns out to be read-only is closed, so that its pool opens another.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, pq
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row

from commandbus.clock import monotonic
from commandbus.db.descriptors import file_behind
from commandbus.db.quick_statements import QuickStatements
from commandbus.db.transient_errors import PassingError

IDLE = TransactionStatus.IDLE
INERROR = TransactionStatus.INERROR
PLAN_SECONDS = 0.1
DROP_PLANS = b"DISCARD PLANS"
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
AnyConnection: TypeAlias = "Connection[Any]"
AnyAsyncConnection: TypeAlias = "AsyncConnection[Any]"


class Runnable(Protocol[T_co]):
    """What both drivers need to know of an operation (`flow.statement.Operation` is one)."""

    @property
    def steps(self) -> Generator[Any, list[tuple[Any, ...]], T_co]: ...

    @property
    def atomic(self) -> bool: ...

    @property
    def whole(self) -> bool: ...


_abandoned: list[PGconn] = []
"""Their sockets' numbers are somebody else's. Collected as garbage, they would close those."""


def never_open() -> PGconn:
    """libpq's part of a connection that is closed, and had no socket."""
    pgconn = pq.PGconn.connect_start(b"nothing")
    pgconn.finish()
    return pgconn


class LostSocketError(PassingError):
    """Somebody else in this process has closed the socket of a connection."""


class UnreplicatedError(PassingError):
    """The server committed, but somebody canceled its wait for the synchronous standby: a failover may lose it.

    `result` is what the operation would have returned.
    """

    sqlstate = "08007"  # transaction_resolution_unknown
    result: Any = None


class OwnConnection(Connection[tuple[Any, ...]]):
    """A sync connection of ours. It keeps a cursor with a small result for the next operation."""

    spare: Cursor[tuple[Any, ...]] | None = None
    checked_at: float = 0.0
    planned_at: float = 0.0
    goes_by_keys: bool = False
    is_unreplicated: bool = False
    quick: QuickStatements | None = None  # in the pool of a bus, if the server keeps prepared statements
    begins: bool | None = False
    """Does a lone statement need a transaction around it, because the server's default is not READ COMMITTED?
    None: nobody has asked the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file = file_behind(self.pgconn.socket)
        self.add_notice_handler(partial(_note_unreplicated, weakref.ref(self)))

    @property
    def has_its_socket(self) -> bool:
        """Is the socket still its own? If somebody has closed it, its number may belong to another file."""
        try:
            return file_behind(self.pgconn.socket) == self._file
        except psycopg.OperationalError:
            return True  # it was closed through psycopg, as usual

    def close(self) -> None:
        """Close it; a socket that is not its own any more is left alone."""
        if self.has_its_socket:
            super().close()
        else:
            _abandoned.append(self.pgconn)
            self.pgconn = never_open()


class ServiceConnection(OwnConnection):
    """A connection of a thread of ours. It checks its socket before each read, too: somebody may close it while
    the server is at work, and the next socket that is opened gets its number."""

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        return super().wait(self._watch(gen), *args, **kwargs)

    def _watch(self, gen: PQGen[T]) -> PQGen[T]:
        try:
            state = next(gen)
            while True:
                ready = yield state
                if not self.has_its_socket:
                    raise LostSocketError("somebody in this process has closed the connection's socket")
                state = gen.send(ready)
        except StopIteration as stop:
            return cast(T, stop.value)


class OwnAsyncConnection(AsyncConnection[tuple[Any, ...]]):
    """An async connection of ours, with a spare cursor too."""

    spare: AsyncCursor[tuple[Any, ...]] | None = None
    checked_at: float = 0.0
    planned_at: float = 0.0
    goes_by_keys: bool = False
    is_unreplicated: bool = False
    quick: QuickStatements | None = None  # in the pool of a bus, if the server keeps prepared statements
    begins: bool | None = False
    """Does a lone statement need a transaction around it, because the server's default is not READ COMMITTED?
    None: nobody has asked the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_notice_handler(partial(_note_unreplicated, weakref.ref(self)))


def _note_unreplicated(
    conn: weakref.ref[OwnConnection | OwnAsyncConnection], notice: psycopg.errors.Diagnostic
) -> None:
    """PostgreSQL reports such a commit as done, with a warning. The text may be translated, so its source is
    compared."""
    if notice.source_function == "SyncRepWaitForLSN" and (own := conn()) is not None:
        own.is_unreplicated = True


def was_unreplicated(conn: object) -> bool:
    """Did a commit of this connection end without its replication? Asking forgets it."""
    if not isinstance(conn, OwnConnection | OwnAsyncConnection) or not conn.is_unreplicated:
        return False
    conn.is_unreplicated = False
    return True


def _check_replicated(conn: AnyConnection | AnyAsyncConnection, result: object) -> None:
    if was_unreplicated(conn):
        error = UnreplicatedError(
            "the commit was canceled while it waited for the synchronous standby: it is not acknowledged, though "
            "it may have happened; look, or send again with the same command_id"
        )
        error.result = result
        raise error


def run(conn: AnyConnection, operation: Runnable[T]) -> T:
    """Run an operation on a sync connection."""
    try:
        result = _run_whole(conn, operation)
    except psycopg.errors.ReadOnlySqlTransaction:
        if isinstance(conn, OwnConnection) and conn.autocommit:
            conn.close()  # the session may stay read-only, or another server is the writer now
        raise
    _check_replicated(conn, result)
    return result


def _run_whole(conn: AnyConnection, operation: Runnable[T]) -> T:
    if operation.whole and not conn.autocommit and conn.info.transaction_status == IDLE:
        conn.execute(b"SELECT")  # the caller's transaction begins here, so that ours is a savepoint in it
    if (operation.atomic or getattr(conn, "begins", False)) and (conn.autocommit or operation.whole):
        with conn.transaction():
            return _run(conn, operation.steps)
    return _run(conn, operation.steps)


def _run(conn: AnyConnection, steps: Generator[Any, list[tuple[Any, ...]], T]) -> T:
    own = conn if isinstance(conn, OwnConnection) else None
    cursor = own.spare if own is not None else None
    if own is not None:
        own.spare = None  # this name is taken: an operation inside this one gets another
    if cursor is None:
        cursor = conn.cursor(row_factory=tuple_row)
    try:
        statement = next(steps)
        while True:
            try:
                if own is not None and must_plan_anew(own, statement):
                    cursor.execute(DROP_PLANS, prepare=False)
                if own is not None and (quick := quick_steps(own, statement)) is not None:
                    with own.lock:
                        rows = own.wait(quick)
                else:
                    cursor.execute(statement.sql, statement.params)
                    rows = cursor.fetchall() if has_rows(cursor.pgresult) else []
            except psycopg.Error as error:
                statement = steps.throw(error)
            else:
                statement = steps.send(rows)
    except StopIteration as stop:
        if own is not None and is_small(cursor.pgresult):
            own.spare = cursor
        return cast(T, stop.value)


async def run_async(conn: AnyAsyncConnection, operation: Runnable[T], *, limit: bytes | None = None) -> T:
    """Run an operation on an async connection. `limit` is a statement that begins each of its transactions: it
    limits the time of the others (`limit_statement`)."""
    try:
        result = await _run_whole_async(conn, operation, limit)
    except psycopg.errors.ReadOnlySqlTransaction:
        if isinstance(conn, OwnAsyncConnection) and conn.autocommit:
            await conn.close()
        raise
    _check_replicated(conn, result)
    return result


def limit_statement(seconds: float, *, lock_seconds: float) -> bytes:
    """Ends each statement of a transaction after so many seconds, and each wait for a lock. The limits end with
    the transaction, so they also hold behind a pooler, whose sessions are other clients', too."""
    return (
        f"SELECT pg_catalog.set_config('statement_timeout', '{seconds * 1000:.0f}', true), "
        f"pg_catalog.set_config('lock_timeout', '{lock_seconds * 1000:.0f}', true)"
    ).encode()


async def _run_whole_async(conn: AnyAsyncConnection, operation: Runnable[T], limit: bytes | None) -> T:
    if operation.whole and not conn.autocommit and conn.info.transaction_status == IDLE:
        await conn.execute(b"SELECT")
    if (operation.atomic or getattr(conn, "begins", False)) and (conn.autocommit or operation.whole):
        async with conn.transaction():
            if limit is not None:
                await conn.execute(limit)
            return await _run_async(conn, operation.steps)
    return await _run_async(conn, operation.steps, limit)


async def _run_async(
    conn: AnyAsyncConnection, steps: Generator[Any, list[tuple[Any, ...]], T], limit: bytes | None = None
) -> T:
    """Each statement is a transaction of its own if there is a limit."""
    own = conn if isinstance(conn, OwnAsyncConnection) else None
    cursor = own.spare if own is not None else None
    if own is not None:
        own.spare = None
    if cursor is None:
        cursor = conn.cursor(row_factory=tuple_row)
    try:
        statement = next(steps)
        while True:
            try:
                if own is not None and must_plan_anew(own, statement):
                    await cursor.execute(DROP_PLANS, prepare=False)
                if limit is not None:
                    async with conn.transaction():
                        await conn.execute(limit)
                        rows = await _rows_of(cursor, statement)
                elif own is not None and (quick := quick_steps(own, statement)) is not None:
                    async with own.lock:
                        rows = await own.wait(quick)
                else:
                    rows = await _rows_of(cursor, statement)
            except psycopg.Error as error:
                statement = steps.throw(error)
            else:
                statement = steps.send(rows)
    except StopIteration as stop:
        if own is not None and is_small(cursor.pgresult):
            own.spare = cursor
        return cast(T, stop.value)


async def _rows_of(cursor: AsyncCursor[tuple[Any, ...]], statement: Any) -> list[tuple[Any, ...]]:
    await cursor.execute(statement.sql, statement.params)
    return await cursor.fetchall() if has_rows(cursor.pgresult) else []


def quick_steps(
    conn: OwnConnection | OwnAsyncConnection, statement: Any
) -> PQGen[list[tuple[bytes | None, ...]]] | None:
    """What runs a statement without a cursor; None if it needs one."""
    return conn.quick.steps(statement) if statement.quick and conn.quick is not None else None


def must_plan_anew(conn: OwnConnection | OwnAsyncConnection, statement: Any) -> bool:
    """Must the server plan the statements of this session anew? If so, the caller must do it: it is not asked
    again.

    In a transaction that has failed nothing can be dropped, and nothing but a rollback is run.
    """
    if statement.only_inserts or (statement.by_keys and conn.goes_by_keys):
        return False
    now = monotonic()
    if now - conn.planned_at < PLAN_SECONDS or conn.prepare_threshold is None:
        return False
    if conn.info.transaction_status == INERROR:
        return False
    conn.planned_at = now
    return True


def has_rows(result: PGresult | None) -> bool:
    """Is there anything to fetch? (`cursor.description` would tell too, but builds an object per column.)"""
    return result is not None and result.ntuples > 0


def is_small(result: PGresult | None) -> bool:
    """May a spare cursor hold on to this result? (Making a cursor anew costs 15 of the 75 µs of a send.)"""
    return result is None or result.ntuples <= 1
