"""Seed 001: cancellation flag, grace, stuck detection, execution history; the worker is in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AttemptCanceledError,
    CommandBus,
    CommandStatus,
    DeadlineExceededError,
    HandlerRegistry,
    Worker,
)
from commandbus.worker.board import Board, State
from commandbus.worker.worker_options import Supervision
from support.waiting import Stopwatch, one, until, until_settled, verdicts
from support.workers import add, done, quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
SHORT = {"task_timeout": 0.4, "cancel_grace": 0.4, "max_attempts": 1, "concurrency": 2}
PATIENT = {"task_timeout": 0.4, "cancel_grace": 5.0, "max_attempts": 1}


def attempt_of(db: Db, command_id: str) -> Any:
    """(verdict, error_type, error_code, error, rung, duration_ms, autopsy) of a command's only attempt."""
    (row,) = db.execute(
        "SELECT a.verdict, a.error_type, a.error_code, a.error, a.rung, a.duration_ms, a.autopsy "
        "FROM commandbus.attempt a JOIN commandbus.command c ON c.id = a.command WHERE c.command_id = %s",
        (command_id,),
    ).fetchall()
    return row


def hold_until(flag: threading.Event) -> None:
    """Swallow everything, as the worst handlers do."""
    while not flag.is_set():
        try:
            flag.wait(0.05)
        except BaseException:
            continue


def test_cancel_sets_flag(bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker) -> None:
    """Seed 001 test_cancel_sets_flag: the cancellation flag is set at the time-out."""
    seen: list[tuple[bool, float]] = []

    @handlers.handler("orders", "work")
    def work(ctx: Any) -> None:
        began = time.monotonic()
        before = ctx.canceled.is_set()
        assert ctx.canceled.wait(10)
        seen.append((before, time.monotonic() - began))
        ctx.raise_if_canceled()

    bus.send("orders", "work", command_id="c")
    start_worker(handlers, **PATIENT)
    until_settled(db)
    assert seen[0][0] is False
    assert 0.35 < seen[0][1] < 2
    verdict, kind, code, error, rung, duration, _ = attempt_of(db, "c")
    assert (verdict, kind, code, rung) == ("EXHAUSTED", "DeadlineExceededError", "TIMEOUT", "deadline")
    assert "task_timeout" in error
    assert 350 < duration < 3000


def test_grace_period_respected(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """Seed 001 test_grace_period_respected: during its grace an attempt is not stuck, and keeps its lease."""
    canceled = threading.Event()

    @handlers.handler("orders", "work")
    def work(ctx: Any) -> str:
        assert ctx.canceled.wait(10)
        canceled.set()
        go_on.wait(10)
        return "late but in time"

    bus.send("orders", "work", command_id="c")
    worker = start_worker(handlers, **PATIENT)
    assert canceled.wait(5)
    assert worker.health_status.stuck_threads == 0
    assert bus.get_command("orders", "c").status is CommandStatus.IN_PROGRESS  # type: ignore[union-attr]
    go_on.set()
    until_settled(db)
    assert bus.get_command("orders", "c").result == "late but in time"  # type: ignore[union-attr]
    assert verdicts(db, "c") == []


def test_marked_stuck_after_grace(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Seed 001 test_marked_stuck_after_grace, seed 000 AC4: logged, recorded, and the slot reclaimed."""
    caplog.set_level("INFO", "commandbus")

    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        hold_until(go_on)

    @handlers.handler("orders", "quick")
    def quick(ctx: Any) -> None: ...

    bus.send("orders", "hang", command_id="c", max_attempts=1)
    worker = start_worker(handlers, **SHORT | {"concurrency": 1})
    until(lambda: bus.get_command("orders", "c").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE)  # type: ignore[union-attr]
    verdict, kind, code, error, rung, duration, autopsy = attempt_of(db, "c")
    assert (verdict, kind, code, rung) == ("EXHAUSTED", "ExecutionStuck", "EXECUTION_STUCK", "stuck")
    assert "did not respond to cancellation within 0.4 seconds" in error
    assert 750 < duration < 4000
    assert any("hold_until" in frame for stack in autopsy["stacks"] for frame in stack["frames"])
    assert any("is stuck after" in record.message for record in caplog.records)
    assert worker.health_status.stuck_threads == 1
    # The only slot is back, while the handler still holds its thread.
    bus.send("orders", "quick", command_id="next")
    until(lambda: bus.get_command("orders", "next").status is CommandStatus.COMPLETED)  # type: ignore[union-attr]
    assert not go_on.is_set()


def test_completion_during_grace(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """Seed 001 test_completion_during_grace: what completes in its grace is complete (TRAPS 23)."""

    async def work(command: Any, ctx: Any) -> str:
        try:
            await done(ctx.sleep(10))
        except (AttemptCanceledError, BaseException):
            return "cleaned up"
        return "never"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, **PATIENT)
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.status, found.result) == (CommandStatus.COMPLETED, "cleaned up")


def test_drain_triggered(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, database: str, go_on: threading.Event
) -> None:
    """Seed 001 test_drain_triggered: a supervised worker drains: claims no more, lets healthy ones finish."""
    states: list[tuple[str, str]] = []
    healthy, finish = threading.Event(), threading.Event()

    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        hold_until(go_on)

    @handlers.handler("orders", "healthy", timeout=30)
    def work(ctx: Any) -> str:
        healthy.set()
        assert finish.wait(60)
        return "finished"

    board = Board.create(4)
    told = Supervision(board, "supervisor-1", lambda state, reason: states.append((state, reason)))
    worker = Worker(handlers, settings=quick_settings(database, **SHORT), supervision=told)
    thread = threading.Thread(target=worker.run, daemon=True)
    bus.send("orders", "healthy", command_id="h")
    thread.start()
    assert healthy.wait(60)
    bus.send("orders", "hang", command_id="c", max_attempts=1)
    until(lambda: states)
    assert states[0][0] == "DRAINING"
    assert "c" in states[0][1]
    bus.send("orders", "healthy", command_id="unclaimed")
    until(lambda: board.read().state is State.DRAINING)
    assert thread.is_alive()
    assert worker.state == "DRAINING"
    finish.set()
    thread.join(10)
    assert not thread.is_alive()
    assert bus.get_command("orders", "h").result == "finished"  # type: ignore[union-attr]
    assert bus.get_command("orders", "unclaimed").attempts == 0  # type: ignore[union-attr]
    assert attempt_of(db, "c")[1] == "ExecutionStuck"
    board.close()


def test_execution_history_shows_execution_stuck(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """Seed 001, integration: `while True: pass`, `time.sleep(1000)`, and what ignores its cancel."""
    release = threading.Event()

    @handlers.handler("orders", "spin")
    def spin(ctx: Any) -> None:
        while not release.is_set():
            pass

    @handlers.handler("orders", "sleep")
    def sleep(ctx: Any) -> None:
        release.wait(1000)

    @handlers.handler("orders", "ignore")
    def ignore(ctx: Any) -> None:
        hold_until(release)

    try:
        for kind in ("spin", "sleep", "ignore"):
            bus.send("orders", kind, command_id=kind)
        start_worker(handlers, **SHORT | {"concurrency": 3})
        until_settled(db)
        for kind in ("spin", "sleep", "ignore"):
            attempts = bus.get_attempts("orders", kind)
            assert [attempt.error_type for attempt in attempts] == ["ExecutionStuck"]
            assert attempts[0].rung == "stuck"
    finally:
        release.set()


def test_a_zombie_lands_nothing(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """TRAPS 15: neither its completion, nor its writes, nor a new connection."""
    db.execute("CREATE TABLE mark (text text)")
    errors: list[BaseException] = []
    over = threading.Event()

    @handlers.handler("orders", "zombie")
    def zombie(ctx: Any) -> None:
        try:
            with ctx.connection() as conn:
                while not go_on.is_set():
                    try:
                        conn.execute("INSERT INTO mark VALUES ('held')")
                        conn.execute("SELECT pg_sleep(60)")
                    except psycopg.errors.QueryCanceled:
                        conn.rollback()
        except BaseException as error:
            errors.append(error)
        try:
            with ctx.transaction() as tx:
                tx.execute("INSERT INTO mark VALUES ('new')")
        except BaseException as error:
            errors.append(error)
        over.set()

    bus.send("orders", "zombie", command_id="c")
    start_worker(handlers, **SHORT)
    until_settled(db)
    go_on.set()
    assert over.wait(60)
    assert len(errors) == 2
    assert one(db, "SELECT count(*) FROM mark") == 0
    assert bus.get_command("orders", "c").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE  # type: ignore[union-attr]
    session = attempt_of(db, "c")[6]["session"]
    assert (session["state"], session["wait_event"]) == ("active", "PgSleep")
    assert "pg_sleep" in session["query"]


def test_on_timeout_fail_is_final(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        await done(ctx.sleep(10))

    add(handlers, lane, "work", work, timeout=0.3, on_timeout="fail")
    bus.create_queue("answers")
    bus.send("orders", "work", command_id="c", reply_to="answers", max_attempts=5)
    start_worker(handlers)
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert found.status is CommandStatus.FAILED
    assert verdicts(db, "c") == [(1, "TIMED_OUT")]
    assert one(db, "SELECT message ->> 'outcome' FROM pgmq.q_answers") == "FAILED"


def test_zero_means_no_deadline(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """Seed 002: task_timeout 0 adds no deadline; per handler, per command and for the worker."""
    seen: dict[str, Any] = {}

    async def work(command: Any, ctx: Any) -> None:
        seen[command.command_id] = (ctx.deadline, ctx.remaining())

    add(handlers, lane, "none", work, timeout=0)
    add(handlers, lane, "usual", work)
    add(handlers, lane, "own", work, timeout="2m")
    bus.send("orders", "none", command_id="none")
    bus.send("orders", "usual", command_id="usual")
    bus.send("orders", "own", command_id="own")
    bus.send("orders", "own", command_id="sent", timeout=0)
    bus.send("orders", "none", command_id="sent5", timeout=5)
    start_worker(handlers, task_timeout=None, visibility_timeout=30.0, cancel_grace=10.0, shutdown_timeout=30.0)
    until_settled(db)
    assert seen["none"] == (None, None)
    assert seen["sent"] == (None, None)
    assert 24 < seen["usual"][1] <= 25  # visibility + 5 s - grace
    assert 119 < seen["own"][1] <= 120
    assert 4 < seen["sent5"][1] <= 5


def test_a_child_context_can_only_shorten(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: dict[str, Any] = {}

    @handlers.handler("orders", "sync", timeout=5)
    def sync(ctx: Any) -> None:
        with ctx.child(timeout=60) as child:
            seen["longer"] = child.remaining()
        with ctx.child(timeout=0.2) as child:
            seen["shorter"] = child.remaining()
            with pytest.raises(DeadlineExceededError), child.child(timeout=60) as grandchild:
                grandchild.sleep(3)
            assert child.canceled.is_set()
        assert not ctx.canceled.is_set()
        ctx.raise_if_canceled()

    @handlers.handler("orders", "async", timeout=5)
    async def asynchronous(ctx: Any) -> None:
        import asyncio

        with pytest.raises(DeadlineExceededError):
            async with ctx.child(timeout=0.2):
                await asyncio.sleep(3)
        async with ctx.child(timeout=60) as child:
            seen["async longer"] = child.remaining()
        ctx.raise_if_canceled()

    bus.send("orders", "sync", command_id="s")
    bus.send("orders", "async", command_id="a")
    start_worker(handlers)
    until_settled(db)
    assert verdicts(db, "s") == []
    assert verdicts(db, "a") == []
    assert seen["longer"] <= 5
    assert seen["async longer"] <= 5
    assert seen["shorter"] <= 0.2


def test_cancelling_a_running_command(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """It is asked to stop at once (a notification, not the next renewal) and ends CANCELED."""
    started = threading.Event()

    async def work(command: Any, ctx: Any) -> None:
        started.set()
        await done(ctx.sleep(20))

    add(handlers, lane, "work", work, timeout=30)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers)
    assert started.wait(60)
    assert bus.cancel("orders", "c", operator="ann", reason="changed my mind") == "REQUESTED"
    until_settled(db, 5)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert found.status is CommandStatus.CANCELED
    verdict, _, code, error, _, _, _ = attempt_of(db, "c")
    assert (verdict, code, error) == ("CANCELED", "CANCELED", "canceled by ann: changed my mind")


def test_a_cancelled_command_that_hangs_is_canceled_too(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "hang", timeout=0)
    def hang(ctx: Any) -> None:
        started.set()
        hold_until(go_on)

    bus.send("orders", "hang", command_id="c")
    start_worker(handlers, cancel_grace=0.4)
    assert started.wait(60)
    bus.cancel("orders", "c", operator="ann")
    until_settled(db)
    assert bus.get_command("orders", "c").status is CommandStatus.CANCELED  # type: ignore[union-attr]
    assert attempt_of(db, "c")[:2] == ("CANCELED", "ExecutionStuck")


def test_a_command_that_completes_in_its_grace_is_not_canceled(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "work", timeout=30)
    def work(ctx: Any) -> str:
        started.set()
        ctx.canceled.wait(20)
        return "done all the same"

    bus.send("orders", "work", command_id="c")
    start_worker(handlers, cancel_grace=5)
    assert started.wait(60)
    bus.cancel("orders", "c", operator="ann")
    until_settled(db)
    assert bus.get_command("orders", "c").status is CommandStatus.COMPLETED  # type: ignore[union-attr]


def test_an_async_handler_that_swallows_its_cancel_is_stuck_and_its_slot_comes_back(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    import asyncio

    @handlers.handler("orders", "swallow")
    async def swallow(ctx: Any) -> None:
        while not go_on.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    @handlers.handler("orders", "quick")
    async def quick(ctx: Any) -> None:
        await asyncio.sleep(0)

    bus.send("orders", "swallow", command_id="c")
    start_worker(handlers, **SHORT | {"concurrency": 1})
    until_settled(db)
    assert attempt_of(db, "c")[1] == "ExecutionStuck"
    bus.send("orders", "quick", command_id="next")
    until_settled(db)
    assert any("swallow" in frame for stack in attempt_of(db, "c")[6]["stacks"] for frame in stack["frames"])


def test_a_blocked_loop_is_given_up_and_its_bystanders_are_not_charged(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    import asyncio

    runs: list[tuple[int, int, int]] = []

    @handlers.handler("orders", "block", timeout=0.5)
    async def block(ctx: Any) -> None:
        go_on.wait(30)  # not awaited: the loop stands still

    @handlers.handler("orders", "bystander", timeout=20)
    async def bystander(ctx: Any) -> str:
        runs.append((ctx.attempt, ctx.max_attempts, ctx.attempt_number))
        if len(runs) == 1:
            await asyncio.to_thread(bus.send, "orders", "block", command_id="block", max_attempts=1)
            await asyncio.sleep(10)
        return "done"

    bus.send("orders", "bystander", command_id="b", max_attempts=1)
    start_worker(handlers, cancel_grace=0.4, concurrency=2)
    until_settled(db)
    assert attempt_of(db, "block")[1:3] == ("ExecutionStuck", "EXECUTION_STUCK")
    assert verdicts(db, "b") == [(1, "WAIVED")]
    assert runs == [(1, 1, 1), (1, 1, 2)]
    assert bus.get_command("orders", "b").result == "done"  # type: ignore[union-attr]
    stacks = attempt_of(db, "block")[6]["stacks"]
    assert any("go_on.wait" in frame for stack in stacks for frame in stack["frames"])


def test_a_neighbours_cancel_is_not_the_blockers(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """One async command is to be canceled, another blocks their loop: that one is stuck, not CANCELED."""
    import asyncio

    blocking = threading.Event()

    @handlers.handler("orders", "block", timeout=600)
    async def block(ctx: Any) -> str:
        if ctx.attempt == 1:
            blocking.set()
            go_on.wait(30)
        return "second time"

    @handlers.handler("orders", "wait", timeout=600)
    async def wait(ctx: Any) -> None:
        await asyncio.to_thread(bus.send, "orders", "block", command_id="block")
        await asyncio.sleep(60)

    bus.send("orders", "wait", command_id="wait")
    start_worker(handlers, cancel_grace=0.5, concurrency=2)
    assert blocking.wait(60)
    bus.cancel("orders", "wait", operator="ann")
    until_settled(db)
    assert bus.get_command("orders", "wait").status is CommandStatus.CANCELED  # type: ignore[union-attr]
    assert bus.get_command("orders", "block").result == "second time"  # type: ignore[union-attr]
    verdict, kind, _, error, _, _, _ = attempt_of(db, "block")
    assert (verdict, kind) == ("RETRY", "ExecutionStuck")
    assert error.startswith("it blocked the event loop for ")
    assert "cancellation" not in error


def test_a_query_is_canceled_at_the_deadline(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """The deadline's cancel, not statement_timeout: the outcome is the deadline's (TRAPS 7)."""

    async def work(command: Any, ctx: Any) -> None:
        if lane == "sync":
            with ctx.connection() as conn:
                conn.execute("SELECT pg_sleep(60)")
        else:
            async with ctx.connection() as conn:
                await conn.execute("SELECT pg_sleep(60)")

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, task_timeout=0.4, cancel_grace=5.0, max_attempts=1)
    stopwatch = Stopwatch()
    until_settled(db, 10)
    assert stopwatch.seconds(waits=0.4) < 4
    assert attempt_of(db, "c")[1:3] == ("DeadlineExceededError", "TIMEOUT")
    until(
        lambda: (
            one(
                db,
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND query LIKE 'SELECT pg_sleep%%'",
            )
            == 0
        )
    )


def test_a_lost_lease_stops_the_attempt(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """Layer 3: somebody else holds the command now."""
    started, stopped = threading.Event(), threading.Event()

    async def work(command: Any, ctx: Any) -> None:
        if ctx.attempt_number > 1:
            return
        started.set()
        try:
            await done(ctx.sleep(20))
        finally:
            stopped.set()

    add(handlers, lane, "work", work, timeout=30)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, visibility_timeout=1.5, statement_timeout=1.0, cancel_grace=0.5)
    assert started.wait(60)
    db.execute("UPDATE pgmq.q_orders__commands SET read_ct = read_ct + 1, headers = NULL, vt = now()")
    assert stopped.wait(60)
    until_settled(db)
    assert bus.get_command("orders", "c").status is CommandStatus.COMPLETED  # type: ignore[union-attr]


def test_a_session_that_has_a_stuck_attempts_process_id_by_now_is_spared(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    database: str,
    go_on: threading.Event,
) -> None:
    """The attempt's own session ended, and the server has given its process id to somebody else."""
    with psycopg.connect(database, application_name="innocent") as innocent:

        @handlers.handler("orders", "hang", timeout=0.5)
        def hang(command: Any, ctx: Any) -> None:
            with ctx.connection() as conn:
                conn.execute("SELECT 1")
                ctx._attempt.borrowed.pid = innocent.info.backend_pid
                go_on.wait(30)

        bus.send("orders", "hang", command_id="c", max_attempts=1)
        start_worker(handlers, cancel_grace=0.3)
        until(lambda: verdicts(db, "c"))
        assert one(innocent, "SELECT 1") == 1
        assert one(db, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", innocent.info.backend_pid) == 1
