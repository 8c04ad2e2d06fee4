"""Stopping: what has not started goes back, what runs may finish, what does not is reported, always in time."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from commandbus import (
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    Limit,
    NewCommand,
    StopReport,
    UnknownDomainError,
    Worker,
)
from commandbus.flow.setup.privileges import explained
from support.waiting import Stopwatch, one, until, until_settled, verdicts
from support.workers import add, done, either, opened, quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
HASTY = {"shutdown_timeout": 2.0, "cancel_grace": 0.5}


def test_unstarted_work_goes_back_and_is_not_charged(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    blocking = threading.Event()

    async def quick(command: Any, ctx: Any) -> int:
        return [ctx.attempt, ctx.attempt_number]

    async def block(command: Any, ctx: Any) -> None:
        blocking.set()
        await opened(go_on)

    add(handlers, lane, "quick", quick)
    add(handlers, lane, "block", block)
    bus.send_many("orders", [NewCommand("quick") for _ in range(3000)])
    bus.send("orders", "block", command_id="blocks")
    bus.send_many("orders", [NewCommand("quick", command_id=f"after{n:03}", max_attempts=1) for n in range(300)])
    worker = start_worker(handlers, concurrency=1, poll_interval=30.0)
    assert blocking.wait(60)
    with ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(worker.stop)
        until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'held_by'") == 1)
        assert not stopping.done()
        go_on.set()
        report = stopping.result(10)
    assert report.is_clean
    assert report.given_back > 0
    back = db.execute(
        "SELECT c.command_id, q.read_ct, q.headers, q.vt <= now(), c.waived FROM commandbus.command c "
        "JOIN pgmq.q_orders__commands q USING (msg_id) WHERE c.waived > 0"
    ).fetchall()
    assert len(back) == report.given_back
    assert {row[1:] for row in back} == {(1, None, True, 1)}
    assert verdicts(db, back[0][0]) == [(1, "GIVEN_BACK")]
    assert bus.get_command("orders", "blocks").status is CommandStatus.COMPLETED  # type: ignore[union-attr]

    start_worker(handlers, concurrency=1)
    until_settled(db)
    for command_id, *_ in back:
        found = bus.get_command("orders", command_id)
        assert found is not None
        assert (found.status, found.result) == (CommandStatus.COMPLETED, [1, 2])
        assert (found.charged_attempts, found.attempts) == (1, 2)


def test_stop_waits_for_what_runs(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    started = threading.Event()

    async def work(command: Any, ctx: Any) -> str:
        started.set()
        await opened(go_on)
        return "finished"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    worker = start_worker(handlers)
    assert started.wait(60)
    bus.send("orders", "work", command_id="unclaimed", delay=0.2)
    with ThreadPoolExecutor(1) as thread:
        stopping: Future[StopReport] = thread.submit(worker.stop)
        until(lambda: not worker.is_running)
        until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE vt <= now()") == 1)
        go_on.set()
        report = stopping.result(10)
    assert report == StopReport("stop() was called", settled=1, given_back=0, abandoned=0, unwritten=0)
    assert bus.get_command("orders", "c").result == "finished"  # type: ignore[union-attr]
    assert bus.get_command("orders", "unclaimed").attempts == 0  # type: ignore[union-attr]


def test_a_handler_that_never_returns_is_abandoned_in_time(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    started = threading.Event()

    async def hang(command: Any, ctx: Any) -> None:
        started.set()
        await opened(go_on)

    async def quick(command: Any, ctx: Any) -> None: ...

    add(handlers, lane, "hang", hang)
    add(handlers, lane, "quick", quick)
    bus.send("orders", "hang", command_id="hangs")
    bus.send("orders", "quick", command_id="quick")
    worker = start_worker(handlers, **HASTY)
    assert started.wait(60)
    until(lambda: bus.get_command("orders", "quick").status is CommandStatus.COMPLETED)  # type: ignore[union-attr]
    stopwatch = Stopwatch()
    report = worker.stop()
    assert stopwatch.seconds(waits=2.0) < 2.5
    # An async handler gives in to its cancellation; a sync one that does not look cannot.
    assert (report.abandoned, report.is_clean) == ((1, False) if lane == "sync" else (0, True))
    # Either way it is tried again at once, by whoever comes, and not charged.
    found = bus.get_command("orders", "hangs")
    assert found is not None
    assert found.status is CommandStatus.PENDING
    assert verdicts(db, "hangs") == [(1, "WAIVED")]


def test_an_abandoned_attempt_is_settled_though_the_log_is_slow(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """Nothing runs any more from the moment in which an attempt is abandoned; its outcome comes a little later."""
    started = threading.Event()

    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        started.set()
        go_on.wait(30)

    bus.send("orders", "hang", command_id="hangs")
    worker = start_worker(handlers, **HASTY | {"shutdown_timeout": 4.0})
    assert started.wait(60)
    log = logging.getLogger("commandbus.worker")
    slow = _SlowLog("is stuck", 0.3)
    log.addHandler(slow)
    try:
        report = worker.stop()
    finally:
        log.removeHandler(slow)
    assert slow.was_slow
    assert (report.abandoned, report.unwritten) == (1, 0)
    assert bus.get_command("orders", "hangs").status is CommandStatus.PENDING  # type: ignore[union-attr]
    assert verdicts(db, "hangs") == [(1, "WAIVED")]


class _SlowLog(logging.Handler):
    """Takes a while to write down what contains a text."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__()
        self._text, self._seconds = text, seconds
        self.was_slow = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            time.sleep(self._seconds)
            self.was_slow = True


def test_a_handler_that_blocks_the_event_loop_does_not_delay_the_stop(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "block")
    async def block(ctx: Any) -> None:
        started.set()
        go_on.wait(30)  # not awaited: the loop stands still

    bus.send("orders", "block")
    worker = start_worker(handlers, **HASTY)
    assert started.wait(60)
    stopwatch = Stopwatch()
    report = worker.stop()
    assert stopwatch.seconds(waits=2.0) < 2.5
    assert report.abandoned == 1


def test_an_async_handler_hears_of_the_abandonment(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    started, cleaned = threading.Event(), threading.Event()

    @handlers.handler("orders", "hang")
    async def hang(ctx: Any) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.set()

    bus.send("orders", "hang")
    worker = start_worker(handlers, **HASTY)
    assert started.wait(60)
    worker.stop()
    assert cleaned.wait(2)


def test_a_short_timeout_of_stop_is_kept(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        started.set()
        go_on.wait(30)

    bus.send("orders", "hang")
    worker = start_worker(handlers)
    assert started.wait(60)
    stopwatch = Stopwatch()
    assert worker.stop(wait=0.5).abandoned == 1
    assert stopwatch.seconds(waits=0.5) < 1.0


# --- run() and signals ----------------------------------------------------------------------------------------


def _when(condition: Callable[[], object], *numbers: signal.Signals) -> threading.Thread:
    """Sends signals to this process, one after the other, each when the condition holds."""

    def send() -> None:
        for number in numbers:
            until(condition)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_on_a_signal_and_restores_the_signals(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, number: signal.Signals
) -> None:
    handlers.register("orders", "work", lambda ctx: None)
    before = signal.getsignal(number)
    bus.send("orders", "work", command_id="c")
    worker = Worker(handlers, settings=quick_settings(database))
    thread = _when(lambda: worker.settled == 1, number)
    report = worker.run()
    thread.join()
    assert (report.reason, report.settled, report.is_clean) == (number.name, 1, True)
    assert signal.getsignal(number) is before


def test_a_second_signal_hurries(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, go_on: threading.Event
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        started.set()
        go_on.wait(60)

    bus.send("orders", "hang")
    worker = Worker(handlers, settings=quick_settings(database, shutdown_timeout=60.0))
    second = threading.Event()
    state = lambda: one(db, "SELECT state FROM commandbus.worker")  # noqa: E731

    def send() -> None:
        assert started.wait(60)
        until(lambda: worker.is_running)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: not worker.is_running)
        second.set()
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    began = time.monotonic()
    report = worker.run()
    thread.join()
    assert second.is_set()
    assert time.monotonic() - began < 10
    assert report.abandoned == 1
    assert state() == "STOPPED"


def test_run_in_a_thread_needs_no_signals(database: str, bus: CommandBus, handlers: HandlerRegistry) -> None:
    handlers.register("orders", "work", lambda ctx: None)
    bus.send("orders", "work")
    worker = Worker(handlers, settings=quick_settings(database))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.run)
        until(lambda: worker.settled == 1)
        worker.request_stop("enough")
        assert running.result(10).reason == "enough"


def test_run_raises_what_ended_the_worker(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry
) -> None:
    handlers.register("orders", "work", lambda ctx: None)
    worker = Worker(handlers, settings=quick_settings(database))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.run)
        until(lambda: one(db, "SELECT count(*) FROM commandbus.waiting"))
        db.execute("SELECT pgmq.drop_queue('orders__commands')")
        with pytest.raises(UnknownDomainError, match="'orders'"):
            running.result(10)
    assert not worker.is_running


def test_a_queue_that_is_gone_is_not_taken_for_a_missing_schema(db: Db) -> None:
    """Whichever part of a running worker meets it first."""
    with pytest.raises(psycopg.errors.UndefinedTable) as caught:
        db.execute("SELECT FROM pgmq.q_gone__commands")
    told = explained(caught.value, "worker")
    assert isinstance(told, UnknownDomainError)
    assert told.domain == "gone"


# --- the worker as an object ----------------------------------------------------------------------------------


def test_start_and_stop_in_the_wrong_order_are_errors(
    database: str, bus: CommandBus, handlers: HandlerRegistry
) -> None:
    handlers.register("orders", "work", lambda ctx: None)
    worker = Worker(handlers, settings=quick_settings(database))
    with pytest.raises(RuntimeError, match="not running"):
        worker.stop()
    worker.start()
    with pytest.raises(RuntimeError, match="started already"):
        worker.start()
    worker.stop()
    with pytest.raises(RuntimeError, match="not running"):
        worker.stop()


def test_a_worker_can_be_started_again(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None: ...

    add(handlers, lane, "work", work)
    worker = Worker(handlers, settings=quick_settings(database))
    for _ in range(2):
        with worker:
            assert worker.is_running
            bus.send("orders", "work")
            until_settled(db)
        assert not worker.is_running


def test_a_stopped_worker_leaves_no_thread_no_file_and_no_connection(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            await done(conn.execute("SELECT 1"))

    add(handlers, lane, "work", work)
    worker = Worker(handlers, settings=quick_settings(database))

    def live_and_die() -> None:
        with worker:
            bus.send("orders", "work")
            until_settled(db)
        until(lambda: not any(worker.id in each.name for each in threading.enumerate()))

    live_and_die()
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        live_and_die()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    until(
        lambda: one(
            db,
            "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name LIKE 'commandbus %%' AND application_name <> %s",
            "commandbus bus",
        )
    )


def test_a_hurried_drain_also_ends_what_was_in_a_block_with_a_time_limit(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """In the block it has a deadline, and keeps it. After the block nothing else would end it."""
    bus.declare_limit(Limit("docai", concurrency=1))
    inside, left = threading.Event(), threading.Event()

    @handlers.handler("orders", "work", timeout=0)
    def work(command: Any, ctx: Any) -> str:
        if ctx.attempt_number > 1:
            return "done"
        with ctx.limit("docai", timeout=60):
            inside.set()
            go_on.wait(20)
            ctx.raise_if_canceled()
        left.set()
        ctx.sleep(60)
        return "slept"

    worker = start_worker(handlers)
    assert worker._runtime is not None
    bus.send("orders", "work", command_id="c")
    assert inside.wait(60)
    worker._runtime.drain("the test says so")
    worker._runtime.hurry()
    ticked = worker._runtime.ladder.beat_at
    until(lambda: worker._runtime is None or worker._runtime.ladder.beat_at > ticked + 0.5)
    go_on.set()
    until(lambda: verdicts(db, "c") == [(1, "WAIVED")])
    assert left.is_set()


def test_what_a_hurried_drain_gave_up_was_not_abandoned_by_the_end(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """It was settled then, and tried again elsewhere. The end, which comes later, cuts nothing off."""
    started = threading.Event()

    @handlers.handler("orders", "hang", timeout=0)
    def hang(ctx: Any) -> None:
        started.set()
        go_on.wait(20)

    worker = start_worker(handlers, **HASTY)
    runtime = worker._runtime
    assert runtime is not None
    bus.send("orders", "hang", command_id="c")
    assert started.wait(60)
    runtime.drain("the test says so")
    runtime.hurry()
    until(lambda: runtime.ladder.abandoned == 1)
    report = worker.stop()
    assert verdicts(db, "c") == [(1, "WAIVED")]
    assert (report.abandoned, report.is_clean) == (0, True)


def test_stop_from_another_thread_ends_run(bus: CommandBus, handlers: HandlerRegistry, database: str) -> None:
    """It used to stop the worker under `run`, which then raised that it was not running."""
    handlers.register("orders", "ship", lambda command, ctx: None)
    worker = Worker(handlers, database_url=database)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.run)
        until(lambda: worker.state == "ACTIVE")
        report = worker.stop()
        assert running.result() is report
    assert report.is_clean
    assert worker.state == "STOPPED"
    with pytest.raises(RuntimeError, match="not running"):
        worker.stop()
