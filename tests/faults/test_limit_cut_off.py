"""A holder of a limit's place that is cut off from PostgreSQL: nobody is ever inside with it, and it is told.

The proxy stands between the holder and its server. Somebody else, who reaches the server, wants the same permit.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    HandlerRegistry,
    Limit,
    LimitLostError,
    Settings,
    Worker,
)
from support import isolated_limits
from support.network import Proxy
from support.redis_server import RedisServer
from support.waiting import one, statuses, until, within
from support.workers import add, either, quick_settings

pytestmark = pytest.mark.waits
StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
LEASE = 2.0
IS_BLOCKED = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')"
)


class Inside:
    """Who is inside, as the resource itself would see it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: set[str] = set()
        self.most = 0
        self.left: list[str] = []

    def enter(self, name: str) -> None:
        with self._lock:
            self._now.add(name)
            self.most = max(self.most, len(self._now))

    def leave(self, name: str) -> None:
        with self._lock:
            self._now.discard(name)
            self.left.append(name)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._now


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(params=["postgres", "redis"])
def redis_url(request: pytest.FixtureRequest) -> str | None:
    """Where permits are kept; Redis is in everybody's reach all the time."""
    return request.getfixturevalue("redis_server").url if request.param == "redis" else None


@pytest.fixture
def inside() -> Inside:
    return Inside()


@pytest.fixture
def other(database: str, redis_url: str | None) -> Iterator[CommandBus]:
    """A bus that reaches the server, and knows a limit of one permit."""
    with CommandBus(settings=Settings(database_url=database, redis_url=redis_url)) as bus:
        bus.declare_limit(Limit("docai", concurrency=1, lease=LEASE))
        yield bus


def cut_off(proxy: Proxy, how: str) -> None:
    """No connection, or one on which nothing is heard any more."""
    if how == "cut":
        proxy.is_refusing = True
        proxy.cut()
    else:
        proxy.hearing.clear()


@pytest.fixture(params=["cut", "silent"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def wants_it_too(other: CommandBus, inside: Inside) -> threading.Thread:
    """Somebody waits for the permit, and enters when it has it."""

    def enter() -> None:
        with other.limit("docai", wait=60):
            inside.enter("other")
            time.sleep(0.5)
            inside.leave("other")

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    return thread


def test_a_block_of_a_program_ends_before_somebody_else_begins(
    other: CommandBus, through: str, proxy: Proxy, redis_url: str | None, inside: Inside, how: str
) -> None:
    with CommandBus(settings=Settings(database_url=through, redis_url=redis_url)) as bus:
        with bus.limit("docai") as call:
            inside.enter("holder")
            waiting = wants_it_too(other, inside)
            until(lambda: other.get_limit("docai").callers == 1)
            cut_off(proxy, how)
            until(lambda: call.is_lost, seconds=20)
            with pytest.raises(LimitLostError, match=r"the permit of limit 'docai' is lost.*call no more"):
                call.remaining()
            inside.leave("holder")
        until(lambda: "other" in inside.left, seconds=40)
        waiting.join(20)
        proxy.is_refusing = False
        proxy.hearing.set()
    assert inside.most == 1
    assert inside.left == ["holder", "other"]


def test_an_async_block_of_a_program_is_canceled(
    other: CommandBus, through: str, proxy: Proxy, redis_url: str | None, inside: Inside
) -> None:
    async def hold() -> None:
        async with AsyncCommandBus(settings=Settings(database_url=through, redis_url=redis_url)) as bus:
            try:
                async with bus.limit("docai", timeout=60):
                    inside.enter("holder")
                    try:
                        await asyncio.sleep(60)
                    finally:
                        inside.leave("holder")
            finally:
                proxy.is_refusing = False

    raised: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(hold())
        except LimitLostError as error:
            raised.append(error)

    holding = threading.Thread(target=run, daemon=True)
    holding.start()
    until(lambda: "holder" in inside)
    waiting = wants_it_too(other, inside)
    until(lambda: other.get_limit("docai").callers == 1)
    cut_off(proxy, "cut")
    until(lambda: "other" in inside.left, seconds=40)
    waiting.join(20)
    holding.join(20)
    assert [error.limit for error in raised if isinstance(error, LimitLostError)] == ["docai"]
    assert inside.most == 1


@pytest.mark.parametrize("kind", ["handler", "block", "extended"])
@pytest.mark.parametrize("lane", ["sync", "async"])
def test_an_attempt_is_canceled_before_somebody_else_begins(
    bus: CommandBus,
    db: Db,
    other: CommandBus,
    through: str,
    proxy: Proxy,
    redis_url: str | None,
    start_worker: StartWorker,
    inside: Inside,
    kind: str,
    lane: str,
) -> None:
    """The lease of the permit is far shorter than that of the command."""
    handlers = HandlerRegistry()
    lost: list[bool] = []

    async def wait(ctx: Any) -> None:
        inside.enter("holder")
        try:
            if lane == "async":
                await asyncio.sleep(60)
            else:
                ctx.sleep(60)
        finally:
            inside.leave("holder")

    async def page(command: Any, ctx: Any) -> None:
        if ctx.attempt_number > 1:
            return
        if kind == "extended":
            extended = ctx.extend(300)
            if lane == "async":
                await extended
        if kind == "handler":
            await wait(ctx)
            return
        async with either(ctx.limit("docai")) as call:
            try:
                await wait(ctx)
            finally:
                lost.append(call.is_lost)

    limits = ["docai"] if kind == "handler" else []
    add(handlers, lane, "page", page, limits=limits, timeout=0)
    bus.send("orders", "page")
    start_worker(handlers, through, redis_url=redis_url, visibility_timeout=60.0, statement_timeout=20.0)
    until(lambda: "holder" in inside)
    waiting = wants_it_too(other, inside)
    until(lambda: other.get_limit("docai").callers == 1)
    cut_off(proxy, "cut")
    until(lambda: "other" in inside.left, seconds=40)
    waiting.join(20)
    assert inside.left == ["holder", "other"]
    assert inside.most == 1
    assert lost == ([] if kind == "handler" else [True])
    proxy.is_refusing = False
    until(lambda: statuses(db) == {"COMPLETED": 1}, seconds=30)
    assert one(db, "SELECT charged FROM (SELECT attempt - waived AS charged FROM commandbus.command) x") == 1


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("cut_off", []),
        ("cut_off_async", []),
        ("cut_off_in_block", ["told: the permit of limit 'one' is lost"]),
        ("cut_off_in_async_block", ["lost: True"]),
    ],
)
def test_an_attempt_in_a_process_of_its_own_is_canceled_before_somebody_else_begins(
    bus: CommandBus,
    db: Db,
    through: str,
    proxy: Proxy,
    start_worker: StartWorker,
    tmp_path: Path,
    how: str,
    kind: str,
    told: list[str],
) -> None:
    """The worker that renews for its child is cut off; the child reaches whom it likes."""
    log = tmp_path / "log"

    def lines() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    def enter() -> None:
        with bus.limit("one", wait=60), log.open("a") as file:
            file.write("other\n")

    sent = bus.send("orders", kind, {"folder": str(tmp_path)}, max_attempts=1)
    start_worker(isolated_limits.handlers, through, visibility_timeout=60.0, statement_timeout=20.0)
    until(lambda: lines() == ["in"], seconds=30)
    waiting = threading.Thread(target=enter, daemon=True)
    waiting.start()
    until(lambda: bus.get_limit("one").callers == 1)
    cut_off(proxy, how)
    until(lambda: "other" in lines(), seconds=40)
    waiting.join(20)
    said = lines()
    assert said.index("in") < said.index("out") < said.index("other"), said
    others = [line for line in said if line not in ("in", "out", "other")]
    assert [line for line, start in zip(others, told, strict=True) if not line.startswith(start)] == []
    proxy.is_refusing = False
    proxy.hearing.set()
    until(lambda: statuses(db) == {"COMPLETED": 1}, seconds=60)
    assert {attempt.verdict for attempt in bus.get_attempts("orders", sent.command_id)} <= {"WAIVED", "LOST"}
    assert one(db, "SELECT charged FROM (SELECT attempt - waived AS charged FROM commandbus.command) x") == 1


def test_a_permit_in_redis_is_renewed_while_postgres_is_out_of_reach(
    database: str, through: str, proxy: Proxy, redis_server: RedisServer
) -> None:
    """For longer than its lease: the renewal does not wait for PostgreSQL."""
    settings = Settings(database_url=database, redis_url=redis_server.url)
    key = f"docai_semaphore:{settings.environment}"

    def ends() -> float:
        return float(redis_server.client.zrange(key, 0, 0, withscores=True)[0][1]) / 1e6

    with CommandBus(settings=settings) as other:
        other.declare_limit(Limit("docai", concurrency=1, lease=1))
        with (
            CommandBus(settings=Settings(database_url=through, redis_url=redis_server.url)) as bus,
            bus.limit("docai") as call,
        ):
            first = ends()
            cut_off(proxy, "cut")
            until(lambda: ends() >= first + 3)  # three leases later, and PostgreSQL was never there
            assert not call.is_lost
            proxy.is_refusing = False
            until(lambda: not bus._limit_clients._limit_client.is_down)  # type: ignore[union-attr]
            later = ends()
            until(lambda: ends() > later + 2)
            assert not call.is_lost


def test_a_permit_in_redis_is_not_renewed_for_ever_without_postgres(
    database: str, through: str, proxy: Proxy, redis_server: RedisServer, inside: Inside
) -> None:
    """The others count it out after a while, and may share the limit if Redis goes away then."""
    with CommandBus(settings=Settings(database_url=database, redis_url=redis_server.url)) as other:
        other.declare_limit(Limit("docai", concurrency=1, lease=1))
        with (
            CommandBus(settings=Settings(database_url=through, redis_url=redis_server.url)) as bus,
            bus.limit("docai") as call,
        ):
            cut_off(proxy, "cut")
            within(14, lambda: call.is_lost)
            proxy.is_refusing = False


def test_the_clock_counts_from_before_the_question(bus: CommandBus, db: Db, database: str) -> None:
    """A take that waits for a lock: the lease began before it was answered, and ends no later here than there."""
    bus.declare_limit(Limit("docai", concurrency=1, lease=3))
    with CommandBus(settings=quick_settings(database)) as slow, psycopg.connect(database) as conn:
        with slow.limit("docai"):
            pass  # its limit client is ready
        until(lambda: slow.get_limit("docai").in_use == 0)
        conn.execute("SELECT 1 FROM commandbus.limits FOR UPDATE")
        asked = slow._limit_clients._limit_client.acquire("docai", wait=10, holder="x")  # type: ignore[union-attr]
        until(lambda: one(db, IS_BLOCKED))
        seen_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        conn.rollback()
        permit = asked.answer.result(10)
        assert permit.renewed_at < seen_at
