"""The connection of an async handler reads the answers of a real server, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from commandbus.db.async_answers import HandlersAsyncConnection


@asynccontextmanager
async def wrapped(database: str) -> AsyncIterator[HandlersAsyncConnection]:
    with psycopg.connect(database, autocommit=True) as conn:
        own = HandlersAsyncConnection(conn.pgconn)
        own._pool = None  # as psycopg would warn of it
        await own.set_autocommit(True)
        try:
            yield own
        finally:
            own.answers.close()


def on_a_loop(test: Callable[[str], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    @functools.wraps(test)
    def run(database: str) -> None:
        asyncio.run(test(database))

    return run


async def answer(conn: HandlersAsyncConnection, query: bytes, *values: object) -> Any:
    row = await (await conn.execute(query, values or None)).fetchone()
    assert row is not None
    return row[0]


async def until_it(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the state of libpq and of the loop have no event
            await asyncio.sleep(0)


async def is_active(conn: HandlersAsyncConnection) -> None:
    await until_it(lambda: conn.pgconn.transaction_status == TransactionStatus.ACTIVE)


def watched(conn: HandlersAsyncConnection) -> bool:
    """Does the event loop watch a descriptor of this connection?"""
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    return conn.answers._descriptor in selector.get_map()


def has_pending(pid: int, number: signal.Signals) -> bool:
    """Has this process a signal that it has not yet handled?"""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@on_a_loop
async def test_questions_and_answers_of_many_pieces(database: str) -> None:
    async with wrapped(database) as conn:
        assert len(await answer(conn, b"SELECT repeat('a', 30000000)")) == 30_000_000
        assert await answer(conn, b"SELECT length(%s::text)", "b" * 30_000_000) == 30_000_000
        assert len(await (await conn.execute("SELECT generate_series(1, 100000)")).fetchall()) == 100_000


@on_a_loop
async def test_a_canceled_task_leaves_a_session_that_can_be_used(database: str) -> None:
    async with wrapped(database) as conn:
        for number in range(3):
            sleeping = asyncio.create_task(answer(conn, b"SELECT pg_sleep(60)"))
            await is_active(conn)
            sleeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sleeping
            assert await answer(conn, b"SELECT %s::int", number) == number


@on_a_loop
async def test_a_cancel_that_comes_before_the_server_has_begun_the_query_is_repeated(database: str) -> None:
    async with wrapped(database) as conn:
        pid = await answer(conn, b"SELECT pg_backend_pid()")
        os.kill(pid, signal.SIGSTOP)
        try:
            sleeping = asyncio.create_task(answer(conn, b"SELECT pg_sleep(60)"))
            await is_active(conn)
            sleeping.cancel()
            await until_it(lambda: has_pending(pid, signal.SIGINT))
        finally:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        assert await answer(conn, b"SELECT 1") == 1


@on_a_loop
async def test_a_server_that_hangs_up_while_nobody_asks_is_noticed_once_and_told_to_the_next_question(
    database: str,
) -> None:
    async with wrapped(database) as conn:
        pid = await answer(conn, b"SELECT pg_backend_pid()")
        assert watched(conn)
        with psycopg.connect(database, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
        await until_it(lambda: not watched(conn))  # or the event loop would spin
        with pytest.raises(psycopg.OperationalError, match=r"terminating connection|server closed"):
            await answer(conn, b"SELECT 1")


@on_a_loop
async def test_a_session_that_ends_during_a_question(database: str) -> None:
    async with wrapped(database) as conn:
        asking = asyncio.create_task(answer(conn, b"SELECT pg_sleep(60)"))
        await is_active(conn)
        with socket.socket(fileno=os.dup(conn.pgconn.socket)) as ours:  # as `Borrowed.hang_up` does it
            ours.shutdown(socket.SHUT_RDWR)
        with pytest.raises(psycopg.OperationalError):
            await asking
        assert conn.closed


@on_a_loop
async def test_another_thread_closes_a_connection_and_its_number_is_used_again(database: str) -> None:
    async with wrapped(database) as conn:
        await answer(conn, b"SELECT 1")
        number = conn.pgconn.socket
        await asyncio.to_thread(conn.pgconn.finish)
        with psycopg.connect(database, autocommit=True) as pooled:
            assert pooled.pgconn.socket == number  # the number that the event loop would have known
            other = HandlersAsyncConnection(pooled.pgconn)
            other._pool = None
            await other.set_autocommit(True)
            assert await answer(other, b"SELECT 2") == 2
            other.answers.close()


@on_a_loop
async def test_two_tasks_ask_one_after_the_other_and_errors_reach_theirs(database: str) -> None:
    async with wrapped(database) as conn:
        questions = [b"SELECT 1", b"SELECT 1/0", b"SELECT pg_sleep(0.01), 3", b"SELECT nonsense", b"SELECT 5"]
        found = await asyncio.gather(*(answer(conn, query) for query in questions), return_exceptions=True)
    assert [type(one) for one in found] == [
        int, psycopg.errors.DivisionByZero, str, psycopg.errors.UndefinedColumn, int,
    ]  # fmt: skip


@on_a_loop
async def test_notifications_with_a_time_and_copy(database: str) -> None:
    async with wrapped(database) as conn:
        await conn.execute("LISTEN news")
        await conn.execute("NOTIFY news, 'one'")
        assert [note.payload async for note in conn.notifies(timeout=5, stop_after=1)] == ["one"]
        assert [note async for note in conn.notifies(timeout=0.01)] == []
        async with conn.cursor() as cursor:
            await cursor.execute("CREATE TEMPORARY TABLE copied (n int)")
            async with cursor.copy("COPY copied FROM STDIN") as copy:
                for number in range(50_000):
                    await copy.write_row((number,))
            async with cursor.copy("COPY copied TO STDOUT") as copy:
                assert len([row async for row in copy.rows()]) == 50_000


@on_a_loop
async def test_nothing_is_left_when_it_is_closed(database: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        async with wrapped(database) as conn:
            await answer(conn, b"SELECT 1")
        conn.answers.close()
    assert len(os.listdir("/proc/self/fd")) == before


@on_a_loop
async def test_a_descriptor_that_somebody_closed_is_no_reason_to_fail_and_another_files_stays_open(
    database: str,
) -> None:
    """Else its connection would never get back to the pool, or the other file's owner would lose it."""
    async with wrapped(database) as conn:
        assert await answer(conn, b"SELECT 1") == 1
        os.close(conn.answers._descriptor)
        conn.answers.close()
    async with wrapped(database) as conn:
        assert await answer(conn, b"SELECT 1") == 1
        number = conn.answers._descriptor
        ours, theirs = socket.socketpair()
        with ours, theirs:
            os.dup2(ours.fileno(), number)
            conn.answers.close()
            os.fstat(number)  # raises if it is closed
            os.close(number)
