"""The layers below the ladder: the server's own limits (1), the pool (2), and what normal load costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool

from commandbus import CommandBus, CommandStatus, HandlerRegistry, HealthState, NewCommand, Worker, WorkerWatchdog
from support.waiting import Stopwatch, one, until, until_settled, verdicts
from support.workers import add, done, either

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
LIMITS = "SELECT name, setting::int FROM pg_settings WHERE name = ANY(%s)"
NAMES = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"]


def failure_of(db: Db, command_id: str) -> Any:
    """(error_type, error_code, error, rung) of a command's last recorded attempt."""
    return db.execute(
        "SELECT a.error_type, a.error_code, a.error, a.rung FROM commandbus.attempt a "
        "JOIN commandbus.command c ON c.id = a.command WHERE c.command_id = %s ORDER BY number DESC LIMIT 1",
        (command_id,),
    ).fetchone()


def test_the_servers_limits_are_clipped_to_what_remains_until_stuck(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """Seed 000 AC1, TRAPS 5 and 58: never longer than the attempt, never 0."""
    seen: dict[str, dict[str, int]] = {}

    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            rows = await done((await done(conn.execute(LIMITS, (NAMES,)))).fetchall())
        seen[command.command_type] = dict(rows)

    add(handlers, lane, "short", work, timeout=2)
    add(handlers, lane, "endless", work, timeout=0)
    for kind in ("short", "endless"):
        bus.send("orders", kind)
    start_worker(handlers, cancel_grace=1.0, statement_timeout=25.0)
    until_settled(db)
    assert seen["endless"] == {
        "statement_timeout": 25_000,
        "lock_timeout": 20_000,
        "idle_in_transaction_session_timeout": 25_000,
    }
    assert all(0 < value <= 3_000 for value in seen["short"].values())
    assert seen["short"]["lock_timeout"] < seen["short"]["statement_timeout"]


def test_a_child_contexts_connection_is_limited_to_the_child(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: list[int] = []

    @handlers.handler("orders", "work", timeout=60)
    def work(ctx: Any) -> None:
        with ctx.child(timeout=1) as child, child.connection() as conn:
            seen.append(dict(conn.execute(LIMITS, (NAMES,)).fetchall())["statement_timeout"])

    bus.send("orders", "work")
    start_worker(handlers, cancel_grace=1.0)
    until_settled(db)
    assert 0 < seen[0] <= 2_000


def test_a_statement_timeout_is_a_transient_failure_with_code_timeout(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """Seed 000 AC5; the message names its layer."""

    async def work(command: Any, ctx: Any) -> str:
        if ctx.attempt == 1:
            async with either(ctx.connection()) as conn:
                await done(conn.execute("SELECT pg_sleep(30)"))
        return "second time"

    add(handlers, lane, "work", work, timeout=20)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, statement_timeout=0.3)
    until_settled(db)
    kind, code, error, rung = failure_of(db, "c")
    assert (kind, code, rung) == ("QueryCanceled", "TIMEOUT", "statement")
    assert "layer 1: statement_timeout" in error
    assert bus.get_command("orders", "c").result == "second time"  # type: ignore[union-attr]


def test_a_wait_for_a_row_lock_is_told_from_a_slow_query(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, database: str
) -> None:
    """TRAPS 7: LockNotAvailable is an outcome of its own."""
    db.execute("CREATE TABLE account (id int PRIMARY KEY)")
    db.execute("INSERT INTO account VALUES (1)")

    @handlers.handler("orders", "work", timeout=20)
    def work(ctx: Any) -> None:
        with ctx.connection() as conn:
            conn.execute("SELECT 1 FROM account WHERE id = 1 FOR UPDATE")

    with psycopg.connect(database) as other:
        other.execute("SELECT 1 FROM account WHERE id = 1 FOR UPDATE")
        bus.send("orders", "work", command_id="c", max_attempts=1)
        start_worker(handlers, statement_timeout=1.0)
        until_settled(db)
    kind, code, error, rung = failure_of(db, "c")
    assert (kind, code, rung) == ("LockNotAvailable", "LOCK_TIMEOUT", "lock")
    assert "layer 1: lock_timeout" in error


def test_pool_timeout_is_raised_counted_and_transient(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    database: str,
    go_on: threading.Event,
) -> None:
    """Seed 000 AC3: all connections in use, PoolTimeout after the pool timeout; layer 2, then back-off."""
    taken = threading.Event()
    waits: list[float] = []

    @handlers.handler("orders", "hold", timeout=60)
    def hold(ctx: Any) -> None:
        with ctx.connection():
            taken.set()
            go_on.wait(30)

    @handlers.handler("orders", "want", timeout=60)
    def want(ctx: Any) -> None:
        began = time.monotonic()
        try:
            with ctx.connection():
                pass
        finally:
            waits.append(time.monotonic() - began)

    with ConnectionPool(database, min_size=1, max_size=1) as pool:
        bus.send("orders", "hold")
        worker = start_worker(handlers, pool=pool, pool_timeout=0.5, concurrency=2, max_attempts=1)
        assert taken.wait(60)
        bus.send("orders", "want", command_id="c")
        until(lambda: verdicts(db, "c"))
        kind, code, error, _ = failure_of(db, "c")
        assert (kind, code) == ("PoolTimeout", "POOL_TIMEOUT")
        assert "layer 2: pool_timeout" in error
        assert 0.45 < waits[0] < 5
        assert worker.health_status.pool_exhaustions == 1
        go_on.set()
        until_settled(db)


def test_the_wait_for_a_connection_never_outlasts_the_attempt(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    database: str,
    go_on: threading.Event,
    lane: str,
) -> None:
    """TRAPS 6."""
    taken = threading.Event()

    @handlers.handler("orders", "hold", timeout=60)
    def hold(ctx: Any) -> None:
        with ctx.connection():
            taken.set()
            go_on.wait(30)

    async def want(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()):
            pass

    add(handlers, lane, "want", want, timeout=0.5)
    with ConnectionPool(database, min_size=1, max_size=1) as pool:
        bus.send("orders", "hold")
        start_worker(handlers, pool=pool, pool_timeout=30.0, concurrency=2, max_attempts=1, cancel_grace=3.0)
        assert taken.wait(60)
        stopwatch = Stopwatch()
        bus.send("orders", "want", command_id="c")
        until(lambda: verdicts(db, "c"))
        assert stopwatch.seconds(waits=0.5) < 3
        assert failure_of(db, "c")[1] in ("TIMEOUT", "POOL_TIMEOUT")
        go_on.set()
        until_settled(db)


def test_normal_load_exhausts_nothing_and_uses_slots_plus_four_connections(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, database: str
) -> None:
    """Seed 003 success 1 and 2: no exhaustion, connections = what is in use."""

    @handlers.handler("orders", "query")
    def query(ctx: Any) -> None:
        with ctx.connection() as conn:
            conn.execute("SELECT pg_sleep(0.005)")

    @handlers.handler("orders", "query_async")
    async def query_async(ctx: Any) -> None:
        async with ctx.connection() as conn:
            await conn.execute("SELECT pg_sleep(0.005)")

    for _ in range(3):
        bus.send_many("orders", [NewCommand("query" if n % 2 else "query_async") for n in range(500)])
    worker = start_worker(handlers, concurrency=6)
    most = 0

    def is_over() -> bool:
        nonlocal most
        most = max(
            most,
            one(
                db,
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE %s",
                f"commandbus {worker.id} %",
            ),
        )
        return bool(one(db, "SELECT NOT EXISTS (SELECT FROM commandbus.command WHERE status = 'PENDING')"))

    until(is_over, 60)
    assert 4 < most <= 6 + 4
    assert worker.health_status.pool_exhaustions == 0
    assert worker.health_status.state is HealthState.HEALTHY


def test_three_stuck_attempts_are_critical_and_the_watchdog_restarts_once(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """Seed 003: past the stuck threshold health is CRITICAL and the restart callback is called, once."""
    calls: list[float] = []

    @handlers.handler("orders", "hang", timeout=0.2)
    def hang(ctx: Any) -> None:
        go_on.wait(60)

    worker = start_worker(handlers, cancel_grace=0.2, concurrency=4, max_attempts=1)
    with WorkerWatchdog(worker, check_interval=0.05, restart_callback=lambda: calls.append(time.monotonic())):
        bus.send_many("orders", [NewCommand("hang") for _ in range(2)])
        until(lambda: worker.health_status.stuck_threads == 2)
        assert worker.health_status.state is HealthState.HEALTHY
        assert calls == []
        bus.send("orders", "hang")
        until(lambda: calls)
        assert worker.health_status.state is HealthState.CRITICAL
        bus.send("orders", "hang")
        until(lambda: worker.health_status.stuck_threads == 4)
    assert len(calls) == 1
    assert worker.state == "ACTIVE"  # in an application nothing drains


def test_business_failures_say_nothing_of_the_workers_health(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    from commandbus import BusinessRuleException, PermanentCommandError

    @handlers.handler("orders", "refuse")
    def refuse(command: Any, ctx: Any) -> None:
        raise BusinessRuleException("no") if command.data else PermanentCommandError("never")

    bus.send_many("orders", [NewCommand("refuse", data=n % 2) for n in range(40)])
    worker = start_worker(handlers)
    until_settled(db)
    assert worker.health_status.consecutive_failures == 0
    assert worker.health_status.state is HealthState.HEALTHY


@pytest.mark.slow
def test_a_hundred_thousand_deadlines_leave_nothing_behind(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """No timer, no thread, no memory: a deadline is two numbers on an object that goes away."""
    from commandbus.worker.memory import resident_megabytes

    @handlers.handler("orders", "quick", timeout=30)
    def quick(ctx: Any) -> None: ...

    @handlers.handler("orders", "quick_async", timeout=30)
    async def quick_async(ctx: Any) -> None: ...

    worker = start_worker(handlers, concurrency=8, retention_age=None)

    def drain(count: int) -> None:
        for _ in range(count // 10_000):
            bus.send_many("orders", [NewCommand("quick" if n % 2 else "quick_async") for n in range(10_000)])
        until_settled(db, 120)

    drain(20_000)
    threads, before = threading.active_count(), resident_megabytes()
    drain(100_000)
    runtime = worker._runtime
    assert runtime is not None
    until(lambda: not runtime.attempts.held)
    assert not runtime.attempts.running
    assert threading.active_count() == threads
    assert resident_megabytes() - before < 25
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 120_000


def test_progress_is_shown_while_it_runs(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    @handlers.handler("orders", "work", timeout=60)
    def work(ctx: Any) -> None:
        ctx.heartbeat({"page": 3, "of": 17})
        go_on.wait(30)

    bus.send("orders", "work", command_id="c")
    start_worker(handlers)
    until(lambda: bus.get_command("orders", "c").progress == {"page": 3, "of": 17})  # type: ignore[union-attr]
    go_on.set()
    until_settled(db)
    assert bus.get_command("orders", "c").status is CommandStatus.COMPLETED  # type: ignore[union-attr]


def test_extend_moves_the_deadline_up_to_a_maximum(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[Any] = []

    async def work(command: Any, ctx: Any) -> None:
        await done(ctx.extend(5))
        seen.append(ctx.remaining())
        await done(ctx.sleep(0.8))
        with pytest.raises(ValueError, match="max_extension"):
            await done(ctx.extend("2h"))

    add(handlers, lane, "work", work, timeout=0.4)
    bus.send("orders", "work", command_id="c", max_attempts=1)
    start_worker(handlers)
    until_settled(db)
    assert verdicts(db, "c") == []
    assert 4 < seen[0] <= 5


def test_a_killed_processes_statement_ends_soon(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, database: str
) -> None:
    """TRAPS 52: the server looks whether the client is still there; a lent pool gets its own setting back."""
    seen: list[str] = []

    @handlers.handler("orders", "look")
    def look(ctx: Any) -> None:
        with ctx.connection() as conn:
            seen.append(conn.execute("SHOW client_connection_check_interval").fetchone()[0])

    with ConnectionPool(database, min_size=1, max_size=1) as pool:
        bus.send("orders", "look")
        start_worker(handlers, pool=pool)
        until_settled(db)
        with pool.connection() as conn:
            seen.append(one(conn, "SHOW client_connection_check_interval"))
    assert seen == ["2s", "0"]
