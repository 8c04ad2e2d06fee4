"""The two drivers: they run an operation's statements on a connection, sync or async. Nothing else differs.

A connection of our own is in autocommit mode: a one-statement operation is one round trip, an atomic one gets a
transaction. A connection lent by the caller (`conn=`) keeps its transaction: on one that is not in autocommit
mode nothing is begun or committed here, so that the caller's rollback takes our rows with it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row

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


def run(conn: AnyConnection, operation: Runnable[T]) -> T:
    """Run an operation on a sync connection."""
    steps = operation.steps
    with _scope(conn, atomic=operation.atomic), conn.cursor(row_factory=tuple_row) as cursor:
        try:
            statement = next(steps)
            while True:
                try:
                    cursor.execute(statement.sql, statement.params)
                    rows = cursor.fetchall() if cursor.description else []
                except psycopg.Error as error:
                    statement = steps.throw(error)
                else:
                    statement = steps.send(rows)
        except StopIteration as stop:
            return cast(T, stop.value)


async def run_async(conn: AnyAsyncConnection, operation: Runnable[T]) -> T:
    """Run an operation on an async connection."""
    steps = operation.steps
    async with _async_scope(conn, atomic=operation.atomic), conn.cursor(row_factory=tuple_row) as cursor:
        try:
            statement = next(steps)
            while True:
                try:
                    await cursor.execute(statement.sql, statement.params)
                    rows = await cursor.fetchall() if cursor.description else []
                except psycopg.Error as error:
                    statement = steps.throw(error)
                else:
                    statement = steps.send(rows)
        except StopIteration as stop:
            return cast(T, stop.value)


def _scope(conn: AnyConnection, *, atomic: bool) -> AbstractContextManager[Any]:
    return conn.transaction() if atomic and conn.autocommit else nullcontext()


def _async_scope(conn: AnyAsyncConnection, *, atomic: bool) -> AbstractAsyncContextManager[Any]:
    return conn.transaction() if atomic and conn.autocommit else nullcontext()
