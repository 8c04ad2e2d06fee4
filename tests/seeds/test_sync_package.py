"""`commandbus.sync` as its specification writes it: every name, a caller's samples, the refusals."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool, PoolTimeout

import commandbus.sync
from commandbus import (
    AsyncWorker,
    Command,
    CommandStatus,
    NewCommand,
    StepCommand,
    StepReply,
    UnknownCommandTypeError,
)
from commandbus.sync import (
    HealthState,
    HealthStatus,
    SyncAuditLogger,
    SyncBaseProcessManager,
    SyncBatchRepository,
    SyncCommandBus,
    SyncCommandRepository,
    SyncHandlerRegistry,
    SyncPgmqClient,
    SyncProcessReplyRouter,
    SyncProcessRepository,
    SyncWorker,
    WorkerWatchdog,
    check_connection,
    create_pool,
)
from support.waiting import until


@pytest.fixture
def pool(database: str) -> Iterator[ConnectionPool[Any]]:
    """The pool of the specification's sample."""
    pool = create_pool(
        conninfo=database,
        min_size=4,
        max_size=16,
        timeout=30.0,
        max_lifetime=3600.0,
        max_idle=600.0,
        num_workers=3,
        check=ConnectionPool.check_connection,
        reconnect_timeout=300.0,
    )
    yield pool
    pool.close()


@pytest.fixture
def bus(pool: ConnectionPool[Any]) -> SyncCommandBus:
    bus = SyncCommandBus(pool)
    bus.create_domain("orders")
    return bus


@pytest.fixture
def registry() -> SyncHandlerRegistry:
    return SyncHandlerRegistry()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("pool", "create_pool"),
        ("pgmq", "SyncPgmqClient"),
        ("repositories", "SyncCommandRepository SyncAuditLogger SyncBatchRepository SyncProcessRepository"),
        ("repositories.command", "SyncCommandRepository"),
        ("repositories.audit", "SyncAuditLogger"),
        ("repositories.batch", "SyncBatchRepository"),
        ("repositories.process", "SyncProcessRepository"),
        ("bus", "SyncCommandBus"),
        ("worker", "SyncWorker"),
        ("process", "SyncProcessReplyRouter SyncBaseProcessManager"),
        ("process.router", "SyncProcessReplyRouter"),
        ("process.base", "SyncBaseProcessManager"),
        ("health", "HealthStatus HealthState"),
        ("watchdog", "WorkerWatchdog"),
        ("handler", "SyncHandlerRegistry"),
    ],
)
def test_every_file_of_the_specification_has_its_names(module: str, names: str) -> None:
    found = importlib.import_module(f"commandbus.sync.{module}")
    for name in names.split():
        assert getattr(found, name) is getattr(commandbus.sync, name)


# --- the worker -----------------------------------------------------------------------------------------------


def test_a_worker_runs_commands_on_the_callers_pool(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    @registry.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> Any:
        with ctx.connection() as conn:
            return conn.execute("SHOW statement_timeout").fetchone()[0]

    worker = SyncWorker(
        pool, "orders", registry, concurrency=4, poll_interval=1.0, visibility_timeout=30, statement_timeout=20000
    )
    bus.send("orders", "ship", command_id="k")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.run)  # blocks until stop() is called
        until(lambda: bus.get_command("orders", "k").status is CommandStatus.COMPLETED)  # type: ignore[union-attr]
        assert worker.health_status.state is HealthState.HEALTHY
        worker.stop()
        assert running.result().is_clean
    assert bus.get_command("orders", "k").result == "20s"  # type: ignore[union-attr]
    assert pool.get_stats()["pool_size"] >= 4


@pytest.mark.parametrize("statement_timeout", [30000, 40000])
def test_the_timeout_hierarchy_is_validated(
    pool: ConnectionPool[Any], registry: SyncHandlerRegistry, statement_timeout: int
) -> None:
    says = rf"statement_timeout \({statement_timeout}ms\) must be less than visibility_timeout \(30s = 30000ms\)"
    with pytest.raises(ValueError, match=says):
        SyncWorker(pool, "orders", registry, visibility_timeout=30, statement_timeout=statement_timeout)


def test_the_defaults_are_those_of_the_specification(
    pool: ConnectionPool[Any], registry: SyncHandlerRegistry
) -> None:
    settings = SyncWorker(pool, "orders", registry).settings
    assert (settings.concurrency, settings.poll_interval) == (4, 1.0)
    assert (settings.visibility_timeout, settings.statement_timeout) == (30.0, 25.0)
    assert settings.max_messages is None, "there it is 10,000; see docs/requirements.md, number 107"


def test_max_messages_requests_a_restart(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    registry.register("orders", "ship", lambda command, ctx: None)
    bus.send_many("orders", [NewCommand("ship") for _ in range(20)])
    report = SyncWorker(pool, "orders", registry, concurrency=1, max_messages=5).run()
    assert report.settled >= 5


def test_a_stuck_attempt_costs_the_pool_no_connection(
    database: str, registry: SyncHandlerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANCEL_GRACE_SECONDS", "0.3")
    monkeypatch.setenv("WORKER_MAX_ATTEMPTS", "1")
    over = threading.Event()

    @registry.handler("orders", "hang", timeout=0.3)
    def hang(command: Any, ctx: Any) -> None:
        with ctx.connection():
            over.wait(60)

    @registry.handler("orders", "work")
    def work(command: Any, ctx: Any) -> int:
        with ctx.connection() as conn:
            return int(conn.execute("SELECT 1").fetchone()[0])

    with create_pool(database, min_size=1, max_size=2) as pool:
        bus = SyncCommandBus(pool)
        bus.create_domain("orders")
        bus.send_many("orders", [NewCommand("hang", command_id=f"h{n}") for n in range(3)])
        worker = SyncWorker(pool, "orders", registry)
        try:
            with worker:
                until(lambda: worker.health_status.stuck_threads >= 2)
                bus.send_many("orders", [NewCommand("work", command_id=f"w{n}") for n in range(3)])
                until(lambda: bus.commands.count_by_status("orders").get(CommandStatus.COMPLETED, 0) == 3)
        finally:
            over.set()


# --- handlers -------------------------------------------------------------------------------------------------


def test_dispatch_calls_sync_and_async_handlers(registry: SyncHandlerRegistry) -> None:
    @registry.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> Any:
        return [command.data, ctx]

    @registry.handler("orders", "pack")
    async def pack(ctx: Any) -> Any:
        await asyncio.sleep(0)
        return ctx

    registry.register("orders", "wrap", lambda command, ctx: pack(ctx))  # a sync handler that returns a coroutine
    assert registry.dispatch(Command("orders", "ship", "k", 1), "ctx") == [1, "ctx"]
    assert registry.dispatch(Command("orders", "pack", "k", None), "ctx") == "ctx"
    assert registry.dispatch(Command("orders", "wrap", "k", None), "ctx") == "ctx"
    with pytest.raises(UnknownCommandTypeError):
        registry.dispatch(Command("orders", "lose", "k", None), "ctx")


# --- repositories ---------------------------------------------------------------------------------------------


def test_each_repository_is_made_with_a_pool(pool: ConnectionPool[Any], bus: SyncCommandBus) -> None:
    assert SyncCommandRepository(pool).save("orders", NewCommand("ship", command_id="k")).created
    SyncAuditLogger(pool).log("orders", "k", "SEEN")
    assert len(SyncAuditLogger(pool).get_events("orders", "k")) == 2
    SyncBatchRepository(pool).save("orders", [NewCommand("ship")], batch_id="b")
    assert SyncBatchRepository(pool).get("orders", "b").total == 1  # type: ignore[union-attr]
    assert SyncProcessRepository(pool).query("orders").items == []
    client = SyncPgmqClient(pool)
    client.create_queue("answers")
    client.send("answers", {"n": 1})
    assert [message.message for message in client.read("answers")] == [{"n": 1}]


# --- processes ------------------------------------------------------------------------------------------------


class Trip(SyncBaseProcessManager[Any]):
    """One step."""

    process_type = "trip"
    domain = "trips"

    def first_step(self, state: Any) -> str:
        return "book"

    def build_command(self, step: str, state: Any) -> StepCommand:
        return StepCommand("orders", step, state)

    def next_step(self, step: str, reply: StepReply, state: Any) -> None:
        return None


def test_processes_are_moved_by_a_router_on_the_callers_pool(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    registry.register("orders", "book", lambda command, ctx: {"booked": command.data})
    bus.create_domain("trips")
    manager = Trip()
    with SyncProcessReplyRouter(pool, [manager]), SyncWorker(pool, "orders", registry):
        bus.start_process(manager, {"city": "Rome"}, process_id="p")
        until(lambda: bus.processes.get("trips", "p").status == "COMPLETED")  # type: ignore[union-attr]


# --- health ---------------------------------------------------------------------------------------------------


def test_health_as_the_specification_tracks_it() -> None:
    status = HealthStatus()
    assert (status.FAILURE_THRESHOLD, status.STUCK_THRESHOLD, status.EXHAUSTION_THRESHOLD) == (10, 3, 5)
    for _ in range(10):
        status.record_failure(RuntimeError("no"))
    assert (status.state, status.consecutive_failures) == (HealthState.DEGRADED, 10)
    status.record_success()
    assert (status.state, status.consecutive_failures) == (HealthState.HEALTHY, 0)
    for _ in range(3):
        status.record_stuck_thread()
    assert status.is_critical()
    exhausted = HealthStatus()
    for _ in range(5):
        assert not exhausted.is_critical()
        exhausted.record_pool_exhaustion()
    assert exhausted.is_critical()


def test_the_watchdog_of_the_specification(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    registry.register("orders", "ship", lambda command, ctx: None)
    recovered = threading.Event()
    with SyncWorker(pool, "orders", registry) as worker:
        watchdog = WorkerWatchdog(worker, check_interval=0.1, restart_callback=recovered.set)
        watchdog.start()
        for _ in range(3):
            worker.health_status.record_stuck_thread()
        assert recovered.wait(60)
        watchdog.stop()


def test_the_watchdog_stops_a_worker_that_runs(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    """Without a callback it calls worker.stop(), and run() ends in order, for a process supervisor to restart."""
    registry.register("orders", "ship", lambda command, ctx: None)
    worker = SyncWorker(pool, "orders", registry)
    watchdog = WorkerWatchdog(worker, check_interval=0.1)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.run)
        until(lambda: worker.state == "ACTIVE")
        watchdog.start()
        worker.health_status.set_critical("database_unreachable")
        assert running.result(30).is_clean
    watchdog.stop()


# --- the pool -------------------------------------------------------------------------------------------------


def test_a_pool_for_a_worker(database: str) -> None:
    with create_pool(database, concurrency=6) as pool:
        assert (pool.min_size, pool.max_size) == (6, 12)
    with create_pool(database, concurrency=1) as pool:
        assert (pool.min_size, pool.max_size) == (4, 8)
    with create_pool(database) as pool:
        assert (pool.min_size, pool.max_size, pool.timeout, pool.max_lifetime) == (4, 16, 30.0, 3600.0)
        assert (pool.max_idle, pool.reconnect_timeout, pool.num_workers) == (600.0, 300.0, 3)


def test_a_pool_times_out(database: str) -> None:
    with (
        create_pool(database, min_size=1, max_size=1, timeout=0.2) as pool,
        pool.connection(),
        pytest.raises(PoolTimeout),
    ):
        pool.getconn()


def test_a_connection_is_validated_when_it_is_handed_out(database: str) -> None:
    with create_pool(database, min_size=1, max_size=1) as pool:
        with pool.connection() as conn:
            pid = conn.info.backend_pid
        with psycopg.connect(database, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        with pool.connection() as conn:
            check_connection(conn)
            assert conn.info.backend_pid != pid


def test_a_database_that_is_away_is_critical_until_it_is_back() -> None:
    status, called = HealthStatus(), threading.Event()
    with create_pool(
        "postgresql://127.0.0.1:1/nowhere",
        min_size=1,
        reconnect_timeout=0.2,
        reconnect_failed=lambda pool: called.set(),
        health_status=status,
    ) as pool:
        assert called.wait(60)
        assert status.is_critical()
        assert status.critical_reasons == ["database_unreachable"]
        assert pool.get_stats()["pool_size"] <= 1


def test_a_connection_that_works_clears_it(database: str) -> None:
    status = HealthStatus()
    status.set_critical("database_unreachable")
    with create_pool(database, health_status=status) as pool, pool.connection():
        assert not status.is_critical()


# --- a worker on an event loop --------------------------------------------------------------------------------


def test_an_async_worker(bus: SyncCommandBus, registry: SyncHandlerRegistry, database: str) -> None:
    @registry.handler("orders", "ship")
    async def ship(command: Any, ctx: Any) -> None:
        await asyncio.sleep(0)

    bus.send_many("orders", [NewCommand("ship") for _ in range(3)])

    done = {CommandStatus.COMPLETED: 3}

    async def use() -> None:
        async with AsyncWorker(registry, database_url=database) as worker:
            await asyncio.to_thread(until, lambda: bus.commands.count_by_status("orders") == done)
            assert worker.state == "ACTIVE"
            assert worker.health_status.state is HealthState.HEALTHY
        assert worker.state == "STOPPED"
        running = asyncio.create_task(worker.run())
        await asyncio.to_thread(until, lambda: worker.state == "ACTIVE")
        report = await worker.stop()
        assert (await running) is report
        running = asyncio.create_task(worker.run())
        await asyncio.to_thread(until, lambda: worker.state == "ACTIVE")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert worker.state == "STOPPED"

    asyncio.run(use())
