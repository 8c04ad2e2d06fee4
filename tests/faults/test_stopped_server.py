"""PostgreSQL stands still (SIGSTOP): each `send(within=…)` ends in time, and nothing is sent twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from commandbus import (
    CommandBus,
    DatabaseUnavailableError,
    InvalidCommandError,
    SendFailedError,
    UnknownDomainError,
)
from commandbus.db.embedded import EmbeddedPostgres
from support.calling import Caller, caller_of
from support.waiting import Stopwatch, one, until

pytestmark = pytest.mark.shared_setup
WITHIN = 0.2
PER_SECOND = 200
SENDS = 200
LATE = 1.0  # a thread may get its turn late; the bus itself is measured by the 99th percentile
P99 = 0.3


@pytest.fixture(scope="module")
def url(own_server: EmbeddedPostgres) -> str:
    with psycopg.connect(own_server.dsn, autocommit=True) as conn:
        conn.execute("DROP DATABASE IF EXISTS stopped WITH (FORCE)")
        conn.execute("CREATE DATABASE stopped")
    address = own_server.dsn_of("stopped")
    with CommandBus(address) as bus:
        bus.migrate(domains=["orders"])
    return address


@pytest.fixture(params=["sync", "async"])
def caller(request: pytest.FixtureRequest, url: str) -> Iterator[Caller]:
    forget_all_sends(url)
    with caller_of(request.param, url) as caller:
        caller.send("orders", "ship", command_id="first")
        yield caller


def forget_all_sends(url: str) -> None:
    """A server that stood still still gets what a cut session said last, and may carry it out after the test that
    sent it has ended. When those sessions are gone, nothing is added any more."""
    others = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    with psycopg.connect(url, autocommit=True) as conn:
        until(lambda: one(conn, others) == 0)
        conn.execute("DELETE FROM commandbus.command")


@contextmanager
def standing_still(server: EmbeddedPostgres) -> Iterator[None]:
    """Stops the server and all its processes."""
    postmaster = server.status().pid
    assert postmaster is not None
    os.kill(postmaster, signal.SIGSTOP)  # first: then it starts no more of them
    pids = [postmaster, *_children(postmaster)]
    try:
        for pid in pids[1:]:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(_state(pid) in "TZ" for pid in pids))  # Z: it had ended, and its parent stands still
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def count(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as conn:
        return int(one(conn, "SELECT count(*) FROM commandbus.command"))


@pytest.mark.slow
@pytest.mark.alone  # it measures how late senders are, and they share the processors with other tests
def test_every_send_ends_in_time_and_no_command_is_there_twice(
    caller: Caller, own_server: EmbeddedPostgres, url: str
) -> None:
    sends: list[Any] = []
    stopwatch = Stopwatch()

    def timed(n: int) -> None:
        began = time.monotonic()
        future = caller._do(caller.bus.send, "orders", "ship", n, command_id=f"c{n}", within=WITHIN)
        took: list[float] = []
        future.add_done_callback(lambda _: took.append(time.monotonic() - began))
        sends.append((n, future, took))

    for n in range(SENDS // 2):
        timed(n)
        time.sleep(1 / PER_SECOND)
    with standing_still(own_server):
        for n in range(SENDS // 2, SENDS * 2):
            timed(n)
            time.sleep(1 / PER_SECOND)
        errors = {n: future.exception(10) for n, future, _ in sends}
    seconds = sorted(stopwatch.idle(took[0], waits=WITHIN) for _, _, took in sends)
    assert seconds[-1] < WITHIN + LATE
    assert seconds[int(len(seconds) * 0.99)] <= P99
    failed = {n: error for n, error in errors.items() if error is not None}
    assert len(failed) >= SENDS
    for n, error in failed.items():
        assert isinstance(error, SendFailedError)
        assert (error.domain, error.command_id) == ("orders", f"c{n}")
    sent = [n for n, _, _ in sends if n not in failed]
    unsure = [n for n, error in failed.items() if error.may_be_sent]  # type: ignore[attr-defined]
    assert unsure
    assert 1 + len(sent) <= count(url) <= 1 + len(sent) + len(unsure)
    for n, *_ in sends:  # all again, as their errors say
        caller.send("orders", "ship", n, command_id=f"c{n}", within=10)
    assert count(url) == 1 + len(sends)


def test_a_connection_of_the_caller_is_closed(caller: Caller, own_server: EmbeddedPostgres, url: str) -> None:
    """In a transaction the command cannot have been sent; in autocommit mode it may."""
    for autocommit in (False, True):
        conn = caller._do(_connect, caller.driver, url, autocommit).result(10)
        with standing_still(own_server):
            stopwatch = Stopwatch()
            sending = caller._do(caller.bus.send, "orders", "ship", command_id="mine", within=WITHIN, conn=conn)
            with pytest.raises(SendFailedError) as raised:
                sending.result(10)
            assert WITHIN <= stopwatch.seconds(waits=WITHIN) < WITHIN + LATE
        assert raised.value.may_be_sent is autocommit
        assert conn.closed
        if not autocommit:
            assert count(url) == 1


def _connect(driver: str, url: str, autocommit: bool) -> Any:
    if driver == "sync":
        return psycopg.connect(url, autocommit=autocommit)
    return psycopg.AsyncConnection.connect(url, autocommit=autocommit)


def test_a_pool_of_the_caller(driver_pool: tuple[Caller, Any], own_server: EmbeddedPostgres, url: str) -> None:
    """Its connections are not in autocommit mode: the commit is part of the send."""
    caller, _ = driver_pool
    assert caller.send("orders", "ship", command_id="before", within=5).created
    before = count(url)
    with standing_still(own_server):
        for may_be_sent in (True, False):  # the pool has one connection, and gets no other
            stopwatch = Stopwatch()
            with pytest.raises(SendFailedError) as raised:
                caller.send("orders", "ship", command_id="x", within=WITHIN)
            assert stopwatch.seconds(waits=WITHIN) < WITHIN + LATE
            assert raised.value.may_be_sent is may_be_sent
    caller.send("orders", "ship", command_id="x", within=10)
    assert count(url) == before + 1


@pytest.fixture(params=["sync", "async"])
def driver_pool(request: pytest.FixtureRequest, url: str) -> Iterator[tuple[Caller, Any]]:
    forget_all_sends(url)
    kind: Any = ConnectionPool if request.param == "sync" else AsyncConnectionPool
    pool = kind(url, min_size=1, max_size=1, open=False)
    with caller_of(request.param, None, pool=pool) as caller:
        caller._do(pool.open).result(10)
        yield caller, pool
        caller._do(pool.close).result(10)


def test_a_lock_that_is_held_is_not_waited_for_longer(caller: Caller, url: str) -> None:
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE commandbus.command")
        with pytest.raises(SendFailedError, match=r"may have been sent: .*has not answered") as raised:
            caller.send("orders", "ship", within="200ms")
        assert raised.value.may_be_sent
    again = caller.send("orders", "ship", command_id=raised.value.command_id, within="10s")
    assert again.command_id == raised.value.command_id
    assert count(url) == 2


def test_what_else_can_be_wrong(caller: Caller) -> None:
    with pytest.raises(UnknownDomainError):
        caller.send("nowhere", "ship", within=5)
    for wrong in (0, -1, "soon"):
        with pytest.raises(InvalidCommandError, match="within"):
            caller.send("orders", "ship", within=wrong)
    with caller_of(caller.driver, "postgresql://postgres@127.0.0.1:1/x") as away:
        with pytest.raises(SendFailedError, match=r"was not sent: .*Connection refused") as raised:
            away.send("orders", "ship", command_id="x", within=5)
        assert not raised.value.may_be_sent
        assert isinstance(raised.value, DatabaseUnavailableError)


def test_a_send_that_is_canceled_leaves_the_bus_usable(url: str, own_server: EmbeddedPostgres) -> None:
    from commandbus import AsyncCommandBus

    async def ask() -> None:
        async with AsyncCommandBus(url) as bus:
            await bus.send("orders", "ship")
            with psycopg.connect(url) as holder:
                holder.execute("LOCK TABLE commandbus.command")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(bus.send("orders", "ship", within=20), 0.2)
            assert (await bus.send("orders", "ship", within=20)).created

    asyncio.run(ask())
