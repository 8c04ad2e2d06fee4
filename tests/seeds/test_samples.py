"""The samples of the specification that a caller would write, as they are written there, with real servers.

A comment says where a sketch cannot work as it stands. Its inner parts (`_process_message`,
`_check_stuck_threads`) are tested by what they are for: the acceptance criteria.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool, PoolTimeout

from commandbus import (
    AsyncHandlerContext,
    Command,
    CommandStatus,
    HandlerContext,
    NewCommand,
    RetryPolicy,
    load_settings,
)
from commandbus.sync import (
    HealthState,
    HealthStatus,
    SyncCommandBus,
    SyncHandlerRegistry,
    SyncWorker,
    WorkerWatchdog,
    create_pool,
)
from support.waiting import until

logger = logging.getLogger("application")


@pytest.fixture
def pool(database: str) -> Iterator[ConnectionPool[Any]]:
    """000, "Pool configuration with timeout": a plain psycopg pool.

    The sketch has `max_size=min_size * 2` inside the call, which is a NameError: the size has a name here.
    """
    worker_concurrency = 2
    min_size = max(4, worker_concurrency)
    pool: ConnectionPool[Any] = ConnectionPool(
        conninfo=database,
        min_size=min_size,
        max_size=min_size * 2,
        timeout=30.0,
        max_lifetime=3600.0,
        max_idle=600.0,
        check=ConnectionPool.check_connection,
        reconnect_timeout=300.0,
        open=True,
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


def settled(bus: SyncCommandBus, command_id: str) -> Any:
    """The command, when it waits and runs no more."""

    def look() -> Any:
        found = bus.get_command("orders", command_id)
        waits = (CommandStatus.PENDING, CommandStatus.IN_PROGRESS)
        return found if found is not None and found.status not in waits else None

    return until(look)


# --- 000: the timeout hierarchy ---------------------------------------------------------------------------------


def test_ac1_statement_timeout_configuration(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    """`SET statement_timeout = %s` is a syntax error in psycopg 3; the worker uses set_config."""

    @registry.handler("orders", "ship")
    def ship(command: Command, context: HandlerContext) -> Any:
        with context.connection() as conn:
            return conn.execute("SHOW statement_timeout").fetchone()[0]  # type: ignore[index]

    bus.send("orders", "ship", command_id="k")
    with SyncWorker(pool, "orders", registry, concurrency=2, visibility_timeout=30, statement_timeout=25000):
        assert settled(bus, "k").result == "25s"
    with pool.connection() as conn:
        assert conn.execute("SHOW statement_timeout").fetchone() == ("0",), "the pool's sessions are as they were"


def test_ac2_statement_less_than_visibility(pool: ConnectionPool[Any], registry: SyncHandlerRegistry) -> None:
    """ "Validation at Worker Init", in its words."""
    visibility_timeout, statement_timeout = 30, 30000
    with pytest.raises(ValueError, match="statement_timeout") as refused:
        SyncWorker(
            pool, "orders", registry, visibility_timeout=visibility_timeout, statement_timeout=statement_timeout
        )
    assert str(refused.value).startswith(
        f"statement_timeout ({statement_timeout}ms) must be less than "
        f"visibility_timeout ({visibility_timeout}s = {visibility_timeout * 1000}ms)"
    )
    SyncWorker(pool, "orders", registry, visibility_timeout=30, statement_timeout=25000)


def test_ac3_pool_timeout(database: str, bus: SyncCommandBus, registry: SyncHandlerRegistry) -> None:
    """After the pool's own timeout, as the specification says; 0.3 s here, 30 there."""

    @registry.handler("orders", "ship", retry_policy=RetryPolicy(max_attempts=1))
    def ship(command: Command, context: HandlerContext) -> None:
        with context.connection():
            raise AssertionError("there is no connection")

    with create_pool(database, min_size=1, max_size=1, timeout=0.3) as small, small.connection():
        with pytest.raises(PoolTimeout):
            small.getconn()
        bus.send("orders", "ship", command_id="k")
        with SyncWorker(small, "orders", registry) as worker:
            found = settled(bus, "k")
            assert (found.error_type, found.error_code) == ("PoolTimeout", "POOL_TIMEOUT")
            assert worker.health_status.pool_exhaustions == 1


def test_ac4_thread_abandon_detection(
    pool: ConnectionPool[Any],
    bus: SyncCommandBus,
    registry: SyncHandlerRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thread that goes on after visibility_timeout + 5 s is logged, and its slot is reclaimed."""
    monkeypatch.setenv("CANCEL_GRACE_SECONDS", "0.3")
    monkeypatch.setenv("WORKER_MAX_ATTEMPTS", "1")
    over = threading.Event()

    @registry.handler("orders", "deadlock", timeout=0.3)  # without it: 25 s, and 10 s of grace
    def deadlock(command: Command, context: HandlerContext) -> None:
        over.wait(60)

    registry.register("orders", "ship", lambda command, context: "shipped")
    assert load_settings({}).timeouts.deadline_seconds() + 0.3 == 30 + 5
    bus.send("orders", "deadlock", command_id="stuck")
    try:
        with caplog.at_level(logging.ERROR), SyncWorker(pool, "orders", registry, concurrency=1) as worker:
            assert settled(bus, "stuck").error_type == "ExecutionStuck"
            assert worker.health_status.stuck_threads == 1
            assert any("stuck after" in record.getMessage() for record in caplog.records)
            bus.send("orders", "ship", command_id="next")
            assert settled(bus, "next").result == "shipped"
    finally:
        over.set()


def test_ac5_query_canceled_handling(
    pool: ConnectionPool[Any],
    bus: SyncCommandBus,
    registry: SyncHandlerRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A statement timeout is a transient failure with the code TIMEOUT: a warning, and the command is retried."""

    @registry.handler("orders", "ship", retry_policy=RetryPolicy(max_attempts=2, backoff_schedule=[0]))
    def ship(command: Command, context: HandlerContext) -> str:
        if context.attempt == 1:
            with context.connection() as conn:
                conn.execute("SELECT pg_sleep(30)")
        return "at the second attempt"

    bus.send("orders", "ship", command_id="k")
    with SyncWorker(pool, "orders", registry, visibility_timeout=30, statement_timeout=200):
        assert settled(bus, "k").result == "at the second attempt"
    (failed,) = bus.get_attempts("orders", "k")
    assert (failed.error_type, failed.error_code, failed.verdict) == ("QueryCanceled", "TIMEOUT", "RETRY")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("ship k of domain orders failed" in text and "statement timeout" in text for text in warnings)


# --- 001: cooperative cancellation ------------------------------------------------------------------------------


async def execute_with_cancellation(func: Callable[[], Awaitable[Any]], cancel_event: threading.Event) -> Any:
    """001, "Execution-Side Cooperative Cancellation", by the application.

    The sketch also raises if the event is set after the await, which throws away finished work: a result that came
    within the grace counts, so that is left out.
    """
    if cancel_event.is_set():
        raise asyncio.CancelledError("Execution cancelled")
    return await func()


def test_cooperative_cancellation_by_the_event(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    began = threading.Event()

    @registry.handler("orders", "steps", timeout=0)
    async def steps(command: Command, context: AsyncHandlerContext) -> None:
        async def step() -> None:
            began.set()
            try:
                await asyncio.sleep(60)  # the worker cancels the task as well
            except asyncio.CancelledError:
                assert context.canceled.is_set()

        await execute_with_cancellation(step, context.canceled)
        await execute_with_cancellation(step, context.canceled)

    bus.send("orders", "steps", command_id="k")
    with SyncWorker(pool, "orders", registry):
        assert began.wait(60)
        bus.cancel("orders", "k")
        assert settled(bus, "k").status is CommandStatus.CANCELED


# --- 002: the timeout of a task ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "seconds"), [("0s", None), ("5s", 5.0)])
def test_worker_task_timeout(
    pool: ConnectionPool[Any],
    bus: SyncCommandBus,
    registry: SyncHandlerRegistry,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    seconds: float | None,
) -> None:
    """`WORKER_TASK_TIMEOUT`: 0s passes the context through without a deadline, and cancels nothing."""
    monkeypatch.setenv("WORKER_TASK_TIMEOUT", given)

    @registry.handler("orders", "look")
    def look(command: Command, context: HandlerContext) -> Any:
        with context.child(timeout=2) as child:  # a child context can only shorten
            assert child.remaining() <= 2  # type: ignore[operator]
        remaining = context.remaining()
        return None if remaining is None else 4 < remaining <= 5

    bus.send("orders", "look", command_id="k")
    with SyncWorker(pool, "orders", registry):
        assert settled(bus, "k").result is (None if seconds is None else True)


# --- 003: native sync components --------------------------------------------------------------------------------


def test_the_worker_of_the_sample_on_a_plain_psycopg_pool(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    """`SyncWorker(pool, domain, registry, …)`, `run()` until `stop()`, sync and async handlers, transactions."""
    with pool.connection() as conn:
        conn.execute("CREATE TABLE shipped (id text)")

    @registry.handler("orders", "ship")
    def ship(command: Command, context: HandlerContext) -> None:
        with pool.connection() as conn, conn.transaction():  # "Always use context managers"
            conn.execute("INSERT INTO shipped VALUES (%s)", (command.command_id,))

    @registry.handler("orders", "pack")
    async def pack(command: Command, context: AsyncHandlerContext) -> str:
        await asyncio.sleep(0)
        return "packed"

    registry.register("orders", "wrap", lambda command, context: pack(command, context))  # "during migration"
    bus.send_many("orders", [NewCommand(kind, command_id=kind) for kind in ("ship", "pack", "wrap")])
    worker = SyncWorker(
        pool, "orders", registry, concurrency=4, poll_interval=1.0, visibility_timeout=30, statement_timeout=25000
    )
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.run)
        results = {kind: settled(bus, kind).result for kind in ("ship", "pack", "wrap")}
        worker.stop()
        running.result()
    assert results == {"ship": None, "pack": "packed", "wrap": "packed"}
    with pool.connection() as conn:
        assert conn.execute("SELECT count(*) FROM shipped").fetchone() == (1,)


def test_on_reconnect_failed_makes_health_critical() -> None:
    """Scenario 4, "Database Unreachable", with its callback."""
    health_status, told = HealthStatus(), threading.Event()

    def on_reconnect_failed(pool: ConnectionPool[Any]) -> None:
        logger.critical("Database connection lost for %d seconds - entering degraded mode", pool.reconnect_timeout)
        health_status.set_critical("database_unreachable")
        told.set()

    with create_pool(
        conninfo="postgresql://127.0.0.1:1/nowhere",
        min_size=4,
        max_size=16,
        timeout=30.0,
        max_lifetime=3600.0,
        max_idle=600.0,
        num_workers=3,
        check=ConnectionPool.check_connection,
        reconnect_timeout=0.2,  # 300 there
        reconnect_failed=on_reconnect_failed,
    ):
        assert told.wait(30)
    assert health_status.state == HealthState.CRITICAL
    assert health_status.is_critical()


def test_poison_messages_go_to_the_tsq(
    pool: ConnectionPool[Any], bus: SyncCommandBus, registry: SyncHandlerRegistry
) -> None:
    """Poisoning 5: RetryPolicy(max_attempts=5, backoff_schedule=[1, 5, 30, 120, 300]); here the pauses are 0."""
    assert RetryPolicy(max_attempts=5, backoff_schedule=[1, 5, 30, 120, 300]).backoff_schedule == (
        1,
        5,
        30,
        120,
        300,
    )
    retry_policy = RetryPolicy(max_attempts=5, backoff_schedule=[0])

    @registry.handler("orders", "poison", retry_policy=retry_policy)
    def poison(command: Command, context: HandlerContext) -> None:
        raise RuntimeError("always fails")

    bus.send("orders", "poison", command_id="k")
    with SyncWorker(pool, "orders", registry):
        found = settled(bus, "k")
    assert (found.status, found.attempts) == (CommandStatus.IN_TROUBLESHOOTING_QUEUE, 5)
    assert bus.commands.list_in_tsq("orders")[0].command_id == "k"


@pytest.mark.long
def test_a_connection_that_the_server_ended_costs_nothing(
    pool: ConnectionPool[Any], bus: SyncCommandBus, database: str
) -> None:
    """Scenario 1, "Connection Becomes Invalid": `check` finds out at check-out."""
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert bus.send("orders", "ship").created


def test_the_watchdog_triggers_recovery(
    pool: ConnectionPool[Any],
    bus: SyncCommandBus,
    registry: SyncHandlerRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ "Watchdog Thread Pattern": CRITICAL with its figures, then the callback."""
    registry.register("orders", "ship", lambda command, context: None)
    restart = threading.Event()
    with SyncWorker(pool, "orders", registry) as worker, caplog.at_level(logging.INFO):
        watchdog = WorkerWatchdog(worker, check_interval=0.05, restart_callback=restart.set)
        watchdog.start()
        assert any(thread.name == "worker-watchdog" and thread.daemon for thread in threading.enumerate())
        for _ in range(5):
            worker.health_status.record_pool_exhaustion()
        assert restart.wait(60)
        watchdog.stop()
    critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert any("exhaustions=5" in record.getMessage() for record in critical)


def test_thresholds_of_a_subclass_count() -> None:
    class Strict(HealthStatus):
        STUCK_THRESHOLD = 1

    status = Strict()
    status.record_stuck_thread()
    assert status.is_critical()


@pytest.mark.parametrize(("size", "is_said"), [(2, True), (4, False)])
def test_a_pool_that_is_smaller_than_the_concurrency_says_so_at_start(
    bus: SyncCommandBus,
    database: str,
    registry: SyncHandlerRegistry,
    caplog: pytest.LogCaptureFixture,
    size: int,
    is_said: bool,
) -> None:
    registry.register("orders", "ship", lambda command, context: None)
    with (
        create_pool(database, min_size=1, max_size=size) as small,
        caplog.at_level(logging.WARNING),
        SyncWorker(small, "orders", registry, concurrency=4),
    ):
        said = "has 2 connections at most for 4 slots"
        assert any(said in record.getMessage() for record in caplog.records) == is_said
