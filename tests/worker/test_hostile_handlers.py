"""What handlers and their surroundings may do to the worker's own machinery: it must go on, at full capacity."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, NewCommand, Worker
from commandbus.worker.claimer import Claimer
from commandbus.worker.execution.attempt import Stop, Why
from support.waiting import one, until, until_settled, verdicts

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
SHORT = {"task_timeout": 0.4, "cancel_grace": 0.4, "max_attempts": 1, "concurrency": 2}


def status(db: Db, command_id: str) -> str:
    return str(one(db, "SELECT status FROM commandbus.command WHERE command_id = %s", command_id))


def until_given_up(db: Db, command_id: str) -> None:
    until(lambda: status(db, command_id) not in ("PENDING", "IN_PROGRESS"), 6)


@pytest.fixture
def still_works(bus: CommandBus, db: Db, handlers: HandlerRegistry) -> Callable[[Worker], None]:
    """Both lanes do their work, and every place comes back."""

    @handlers.handler("orders", "quick")
    async def quick(ctx: Any) -> None:
        await asyncio.sleep(0)

    @handlers.handler("orders", "plain")
    def plain(ctx: Any) -> None:
        pass

    def check(worker: Worker) -> None:
        bus.send_many("orders", [NewCommand(kind) for kind in ("quick", "plain") * 10])
        done = "SELECT count(*) FROM commandbus.command WHERE command_type <> 'harm' AND status = 'COMPLETED'"
        until(lambda: one(db, done) == 20, 6)
        runtime = worker._runtime
        assert runtime is not None
        until(
            lambda: (
                runtime.dispatcher.budget.taken == 0 and not runtime.attempts.running and not runtime.attempts.held
            ),
            5,
        )

    return check


def stop_the_loop(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    loop.stop()


def leave_by_a_callback(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    loop.call_soon(sys.exit, 3)


def cancel_its_own_task(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    task.cancel()


def cancel_its_task_later(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    loop.call_later(0.2, task.cancel)


@pytest.mark.parametrize("harm", [stop_the_loop, leave_by_a_callback, cancel_its_own_task, cancel_its_task_later])
def test_the_async_lane_survives(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    still_works: Callable[[Worker], None],
    harm: Callable[[asyncio.AbstractEventLoop, asyncio.Task[Any]], None],
) -> None:
    later = threading.Semaphore(0)

    @handlers.handler("orders", "harm")
    async def handle(ctx: Any) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.call_later(0.25, later.release)
        harm(loop, task)

    bus.send_many("orders", [NewCommand("harm") for _ in range(6)])
    worker = start_worker(handlers, **SHORT)
    until_settled(db)
    assert all(later.acquire(timeout=5) for _ in range(6))
    still_works(worker)


@pytest.mark.parametrize("way", ["task", "callback"])
def test_a_loop_blocked_by_what_a_handler_started_is_given_up(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    still_works: Callable[[Worker], None],
    go_on: threading.Event,
    way: str,
) -> None:
    """Nobody's slot is in the way then, so no slot can be named; the cancel does not arrive all the same."""

    async def block() -> None:
        go_on.wait(60)

    @handlers.handler("orders", "harm")
    async def harm(ctx: Any) -> None:
        if way == "task":
            async with asyncio.TaskGroup() as group:
                group.create_task(block())
        else:
            asyncio.get_running_loop().call_soon(go_on.wait, 60)
            await asyncio.sleep(60)

    bus.send("orders", "harm", command_id="c")
    worker = start_worker(handlers, **SHORT)
    until_given_up(db, "c")
    assert one(db, "SELECT error_type FROM commandbus.attempt") == "ExecutionStuck"
    still_works(worker)


@pytest.fixture
def broken_log() -> Iterator[None]:
    """The application's log handler raises."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the log is broken")

    handler, root = Broken(), logging.getLogger("commandbus")
    root.addHandler(handler)
    yield
    root.removeHandler(handler)


def test_a_log_that_raises_saves_no_stuck_attempt(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    still_works: Callable[[Worker], None],
    go_on: threading.Event,
    broken_log: None,
    lane: str,
) -> None:
    if lane == "sync":
        handlers.register("orders", "harm", lambda ctx: go_on.wait(60))
    else:

        @handlers.handler("orders", "harm")
        async def harm(ctx: Any) -> None:
            while not go_on.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue

    bus.send("orders", "harm", command_id="c")
    worker = start_worker(handlers, **SHORT)
    until_given_up(db, "c")
    still_works(worker)
    assert worker.stop(wait=4).is_clean


def test_a_stack_that_cannot_be_read_saves_no_stuck_attempt(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    still_works: Callable[[Worker], None],
    go_on: threading.Event,
) -> None:
    class Loader:
        def get_source(self, name: str) -> str:
            raise RuntimeError(f"no source of {name}")

    module: dict[str, Any] = {"__name__": "unreadable", "__loader__": Loader()}
    exec(compile("def wait(gate):\n    gate.wait(60)\n", "unreadable.py", "exec"), module)
    handlers.register("orders", "harm", lambda ctx: module["wait"](go_on))
    bus.send("orders", "harm", command_id="c")
    worker = start_worker(handlers, **SHORT)
    until_given_up(db, "c")
    assert "no source of" in one(db, "SELECT autopsy::jsonb ->> 'left_out' FROM commandbus.attempt")
    still_works(worker)


def test_a_cancel_while_a_connection_is_returned_costs_no_connection(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "harm", timeout=0)
    async def harm(ctx: Any) -> None:
        async def use() -> None:
            async with ctx.connection() as conn:
                await conn.execute("SELECT 1")

        for turn in range(300):
            using = asyncio.create_task(use())
            await asyncio.sleep(turn * 0.00001)
            using.cancel()
            await asyncio.wait([using])

    bus.send("orders", "harm")
    worker = start_worker(handlers, concurrency=2, max_attempts=1, pool_timeout=1.0)
    until_settled(db, 30)
    assert worker._runtime is not None
    pool = worker._runtime._connections._own
    assert pool is not None

    def all_are_back() -> bool:
        stats = pool.get_stats()
        return stats["pool_available"] == stats["pool_size"]

    until(all_are_back, 5, what=pool.get_stats)


def test_a_connection_that_a_stuck_attempt_returns_late_is_not_one_more(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    ended = threading.Semaphore(0)

    @handlers.handler("orders", "harm")
    def harm(ctx: Any) -> None:
        try:
            with ctx.connection() as conn:
                conn.execute("SELECT 1")
                go_on.wait(30)
        finally:
            ended.release()

    for _ in range(3):
        bus.send("orders", "harm")
    start_worker(handlers, concurrency=1, max_attempts=1, task_timeout=0.3, cancel_grace=0.2)
    until_settled(db)
    go_on.set()
    assert all(ended.acquire(timeout=5) for _ in range(3))
    bus.send("orders", "harm", command_id="next")
    until_settled(db)
    assert status(db, "next") == "COMPLETED"
    open_now = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE '%%handlers%%'"
    )
    until(lambda: one(db, open_now) == 1, 5)


def test_behind_pgbouncer_nothing_of_a_second_transaction_lands(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """The lock by which its session is found went with the first one."""
    db.execute("CREATE TABLE written (x integer)")
    ended = threading.Event()

    @handlers.handler("orders", "harm")
    def harm(ctx: Any) -> None:
        try:
            with ctx.connection() as conn:
                conn.execute("SELECT 1")
                conn.commit()
                conn.execute("INSERT INTO written VALUES (1)")
                go_on.wait(30)
        finally:
            ended.set()

    bus.send("orders", "harm")
    limits = {"task_timeout": 0.3, "cancel_grace": 0.3}
    start_worker(handlers, concurrency=1, max_attempts=1, prepared_statements=False, **limits)
    until_settled(db)
    go_on.set()
    assert ended.wait(5)
    assert one(db, "SELECT count(*) FROM written") == 0


def test_threads_that_handlers_left_hanging_keep_no_connection_from_others(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    @handlers.handler("orders", "harm", timeout=0.2)
    async def harm(ctx: Any) -> None:
        await asyncio.to_thread(go_on.wait, 60)

    @handlers.handler("orders", "query", timeout=5)
    async def query(ctx: Any) -> None:
        async with ctx.connection() as conn:
            await conn.execute("SELECT 1")

    bus.send_many("orders", [NewCommand("harm") for _ in range(40)])  # more than the loop has threads
    start_worker(handlers, concurrency=8, max_attempts=1, cancel_grace=0.5)
    until_settled(db)
    bus.send("orders", "query", command_id="c")
    until_settled(db)
    assert status(db, "c") == "COMPLETED"


def test_a_deadline_in_the_completing_statement_is_the_deadlines(
    bus: CommandBus, db: Db, database: str, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    with psycopg.connect(database) as other:
        locked = threading.Event()

        @handlers.handler("orders", "harm")
        def harm(ctx: Any) -> None:
            with ctx.transaction():
                other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
                locked.set()

        bus.send("orders", "harm", command_id="c")
        start_worker(handlers, concurrency=1, max_attempts=1, task_timeout=0.5, cancel_grace=5.0)
        assert locked.wait(5)
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        until(lambda: one(db, waiting) == 1)
        until(lambda: one(db, waiting) == 0)
        other.rollback()
    until_settled(db)
    assert one(db, "SELECT error_code FROM commandbus.attempt") == "TIMEOUT"
    assert verdicts(db, "c") == [(1, "EXHAUSTED")]


def test_a_slow_server_slows_by_the_claim_not_by_the_command(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    lane: str,
) -> None:
    """Claims of 40 ms: with the usual 20 ms ahead there would be some 8 commands a claim, for ever."""
    sizes: list[int] = []
    claim = Claimer._claim

    def claim_slowly(self: Claimer, domain: Any, n: int) -> int:
        time.sleep(0.04)
        sizes.append(n)
        return claim(self, domain, n)

    monkeypatch.setattr(Claimer, "_claim", claim_slowly)
    if lane == "sync":
        handlers.register("orders", "work", lambda ctx: None)
    else:

        @handlers.handler("orders", "work")
        async def work(ctx: Any) -> None:
            pass

    bus.send_many("orders", [NewCommand("work") for _ in range(3000)])
    start_worker(handlers, concurrency=4)
    until_settled(db)
    assert max(sizes) > 60


def test_a_cancel_that_came_in_the_moment_of_the_start_arrives_all_the_same(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """The ladder looked where it runs just before it ran anywhere, so nobody canceled its task then."""
    seen: list[str] = []

    @handlers.handler("orders", "harm", timeout=0)
    async def harm(ctx: Any) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("canceled")
            raise

    bus.send("orders", "harm", command_id="c")
    worker = start_worker(handlers, max_attempts=1, cancel_grace=5.0)
    assert worker._runtime is not None
    running = worker._runtime.attempts.running
    until(lambda: running)
    now = time.monotonic()
    next(iter(running)).ask_to_stop(Stop(Why.CANCEL, "enough", now, now + 5.0))
    until_settled(db, 4)
    assert seen == ["canceled"]
    assert status(db, "c") == "CANCELED"
