"""What a worker tells people: figures of each minute, its slots while somebody watches, and live stacks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    CommandNotFoundError,
    HandlerRegistry,
    InvalidOperationError,
    Saga,
    step,
)
from commandbus.db.drivers import run
from commandbus.flow.workers.figures import add_figures
from commandbus.model.minute_figures import BUCKETS
from support.waiting import one, until, until_settled
from worker.conftest import StartWorker

Db = psycopg.Connection[Any]
NONE = [0] * BUCKETS


def blocking(handlers: HandlerRegistry, go_on: threading.Event) -> threading.Event:
    """A handler that waits to go on; returns the event that says that it has begun."""
    begun = threading.Event()

    @handlers.handler("orders", "wait", timeout=30)
    def wait_to_go_on(_command: Any, _ctx: Any) -> None:
        begun.set()
        go_on.wait()

    return begun


# --- slots -------------------------------------------------------------------------------------------------------


def test_a_watched_worker_shows_what_its_slots_run(
    bus: CommandBus, handlers: HandlerRegistry, go_on: threading.Event, start_worker: StartWorker
) -> None:
    begun = blocking(handlers, go_on)
    worker = start_worker(handlers, concurrency=3)
    bus.send("orders", "wait", {}, command_id="a")
    assert begun.wait(30)
    (shown,) = until(lambda: [item for item in bus.watch_slots() if item.slots])
    assert (shown.worker, shown.size, shown.idle) == (worker.id, 3, 2)
    (slot,) = shown.slots
    assert (slot.domain, slot.command_type, slot.command_id, slot.attempt) == ("orders", "wait", "a", 1)
    assert (slot.phase, slot.kind, slot.timeout_seconds, slot.commands) == ("RUNNING", "thread", 30.0, 1)
    assert slot.share is not None
    assert 0 <= slot.share < 1
    assert shown.memory_mb is not None
    go_on.set()
    until(lambda: [item for item in bus.watch_slots() if not item.slots])


def test_no_slot_is_free_while_commands_take_all(
    handlers: HandlerRegistry, bus: CommandBus, go_on: threading.Event, start_worker: StartWorker
) -> None:
    begun = blocking(handlers, go_on)
    handlers.register_process(Saga("trip", step("wait", "orders")))
    bus.create_domain("processes")
    worker = start_worker(handlers, concurrency=1)
    runtime = worker._runtime
    assert runtime is not None
    assert runtime.dispatcher.routed == ["processes"], "it has slots for messages of processes, too"
    assert runtime.dispatcher.free_slots == 1
    bus.send("orders", "wait", {})
    assert begun.wait(30)
    assert runtime.dispatcher.free_slots == 0
    go_on.set()


def test_nobody_watches_and_nothing_is_written(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, go_on: threading.Event, start_worker: StartWorker
) -> None:
    begun = blocking(handlers, go_on)
    start_worker(handlers, concurrency=1)
    bus.send("orders", "wait", {})
    assert begun.wait(30)
    until(lambda: bus.workers().items)  # a handler may begin before its worker is registered
    before = one(db, "SELECT heartbeat_at FROM commandbus.worker")
    until(lambda: one(db, "SELECT heartbeat_at FROM commandbus.worker") > before)
    assert one(db, "SELECT count(*) FROM commandbus.worker_slots") == 0
    until(lambda: bus.watch_slots("1s").items)
    db.execute("UPDATE commandbus.watch SET until = now()")
    until(lambda: not bus.run(_still_published()))
    assert one(db, "SELECT count(*) FROM commandbus.worker_slots") == 1


def _still_published() -> Any:
    """Has a worker published something in the last two seconds? Looking at it is not watching."""
    from commandbus.flow.operation import Operation, Statement

    def steps() -> Any:
        rows = yield Statement(b"SELECT FROM commandbus.worker_slots WHERE taken_at > now() - interval '2 s'")
        return bool(rows)

    return Operation(steps(), atomic=False)


def test_a_worker_that_cannot_listen_learns_of_watchers_by_its_heartbeat(
    database: str, bus: CommandBus, handlers: HandlerRegistry, go_on: threading.Event, start_worker: StartWorker
) -> None:
    begun = blocking(handlers, go_on)
    start_worker(handlers, concurrency=1, prepared_statements=False)
    bus.send("orders", "wait", {}, command_id="a")
    assert begun.wait(30)
    (shown,) = until(lambda: bus.watch_slots().items)
    assert [slot.command_id for slot in shown.slots] == ["a"]


def test_an_attempt_that_was_given_up_is_shown_while_its_thread_hangs(
    bus: CommandBus, handlers: HandlerRegistry, go_on: threading.Event, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "hang", timeout=0.2, on_timeout="fail")
    def hang(_command: Any, _ctx: Any) -> None:
        go_on.wait()

    start_worker(handlers, concurrency=1, cancel_grace=0.2)
    bus.send("orders", "hang", {}, command_id="h")

    def stuck() -> list[Any]:
        return [slot for item in bus.watch_slots() for slot in item.slots if slot.phase == "STUCK"]

    (slot,) = until(stuck)
    assert (slot.command_id, slot.command_type) == ("h", "hang")
    assert slot.reason
    assert [item.idle for item in bus.watch_slots()] == [1], "its slot has another thread"
    go_on.set()
    until(lambda: not stuck())


# --- live stacks -------------------------------------------------------------------------------------------------


def test_the_stack_of_a_running_handler(
    bus: CommandBus, handlers: HandlerRegistry, go_on: threading.Event, start_worker: StartWorker
) -> None:
    begun = blocking(handlers, go_on)
    worker = start_worker(handlers)
    bus.send("orders", "wait", {"secret": "s3cret"}, command_id="a")
    assert begun.wait(30)
    found = bus.request_stack("orders", "a", wait=30)
    assert (found.worker, found.attempt, found.problem) == (worker.id, 1, None)
    frames = found.stacks[0].frames
    assert [frame for frame in frames if frame.file == __file__ and "wait_to_go_on" in frame.function]
    assert frames[-1].function.endswith("wait")
    assert found.seconds is not None
    assert "s3cret" not in repr(found)


def test_the_stack_of_an_async_handler(
    database: str, bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    begun = threading.Event()

    @handlers.handler("orders", "wait", timeout=60)
    async def outer(_command: Any, _ctx: Any) -> None:
        begun.set()
        await inner()

    async def inner() -> None:
        await asyncio.sleep(60)

    worker = start_worker(handlers)
    bus.send("orders", "wait", {}, command_id="a")
    assert begun.wait(30)

    async def ask() -> Any:
        async with AsyncCommandBus(database) as asking:
            return await asking.request_stack("orders", "a", wait="30s")

    found = asyncio.run(ask())
    (stack,) = found.stacks
    names = [frame.function.rpartition(".")[2] for frame in stack.frames]
    assert names[-3:] == ["outer", "inner", "sleep"]
    bus.cancel("orders", "a")
    worker.stop()


def test_a_command_that_does_not_run_has_no_stack(bus: CommandBus) -> None:
    bus.send("orders", "wait", {}, command_id="a")
    found = bus.request_stack("orders", "a")
    assert (found.stacks, found.worker, found.problem) == ([], None, "it is not running: no worker holds it now")
    with pytest.raises(CommandNotFoundError, match="no command 'b' in domain 'orders'"):
        bus.request_stack("orders", "b")
    with pytest.raises(ValueError, match="wait: 'soon' is not a duration"):
        bus.request_stack("orders", "a", wait="soon")


def test_a_worker_that_is_gone_does_not_answer(bus: CommandBus, db: Db) -> None:
    bus.send("orders", "wait", {}, command_id="a")
    db.execute(
        "UPDATE pgmq.q_orders__commands SET vt = now() + interval '1 minute', read_ct = 1, "
        """headers = '{"held_by": "gone"}'"""
    )
    found = bus.request_stack("orders", "a", wait=0.1)
    assert (found.worker, found.attempt, found.stacks) == ("gone", 1, [])
    assert found.problem == "worker gone did not answer within 0.1 s: it may be gone, or too busy"


# --- recycling ---------------------------------------------------------------------------------------------------


def test_a_worker_without_a_supervisor_is_not_recycled(
    bus: CommandBus, handlers: HandlerRegistry, go_on: threading.Event, start_worker: StartWorker
) -> None:
    blocking(handlers, go_on)
    worker = start_worker(handlers)
    until(lambda: bus.workers().items)
    with pytest.raises(InvalidOperationError, match="it has no supervisor"):
        bus.recycle_worker(worker.id, wait=30)
    with pytest.raises(InvalidOperationError, match="no worker 'nobody' is alive"):
        bus.recycle_worker("nobody")


# --- figures -----------------------------------------------------------------------------------------------------


def test_what_was_settled_and_waited_is_told_when_a_worker_stops(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "quick")
    def quick(_command: Any, _ctx: Any) -> None:
        pass

    for _ in range(5):
        bus.send("orders", "quick", {})
    worker = start_worker(handlers)
    until_settled(db)
    worker.stop()
    settled, waited = db.execute(
        "SELECT sum(settled), sum((SELECT sum(n) FROM unnest(waits) n)) FROM commandbus.minute_figure"
    ).fetchone() or (None, None)
    assert (settled, waited) == (5, 5)
    assert bus.last_hour("orders")[0].wait_p50 is not None


def test_figures_of_several_workers_are_added(bus: CommandBus, db: Db) -> None:
    waits = [1, 2, *NONE[2:]]
    run(db, add_figures("orders", settled=3, waits=waits, counts_ready=False))
    run(db, add_figures("orders", settled=4, waits=waits, counts_ready=False))
    assert one(db, "SELECT sum(settled) FROM commandbus.minute_figure") == 7
    assert one(db, "SELECT sum(waits[2]) FROM commandbus.minute_figure") == 4
    assert one(db, "SELECT count(*) FROM commandbus.minute_figure WHERE cardinality(waits) <> %s", BUCKETS) == 0


def test_what_is_ready_is_counted_once_a_minute_over_all_priorities(bus: CommandBus, db: Db) -> None:
    bus.send("orders", "a", {})
    bus.send("orders", "a", {}, priority="high")
    bus.send("orders", "a", {}, priority="low")
    bus.send("orders", "a", {}, delay=60)
    bus.send("orders", "a", {}, delay=60, priority="high")
    db.execute(
        "INSERT INTO commandbus.minute_figure (at, domain, waits) VALUES (now() - interval '3 h', 'orders', '{}')"
    )
    run(db, add_figures("orders", settled=0, waits=NONE, counts_ready=True))
    bus.send("orders", "a", {})
    run(db, add_figures("orders", settled=0, waits=NONE, counts_ready=True))
    assert one(db, "SELECT array_agg(ready) FROM commandbus.minute_figure") == [3], "and the old row is gone"


def test_an_idle_domain_writes_nothing(bus: CommandBus, db: Db) -> None:
    run(db, add_figures("orders", settled=0, waits=NONE, counts_ready=True))
    assert one(db, "SELECT count(*) FROM commandbus.minute_figure") == 0


def test_a_new_version_of_the_code_is_marked(bus: CommandBus, db: Db) -> None:
    db.execute(
        "INSERT INTO commandbus.worker "
        "       (id, host, pid, domains, concurrency, version, code_version, state, started_at) "
        "VALUES ('old', 'm', 1, '{orders}', 1, '1', '8f3a', 'ACTIVE', now() - interval '2 h'), "
        "       ('new', 'm', 2, '{orders}', 1, '1', '9b4c', 'ACTIVE', now() - interval '5 m')"
    )
    (hour,) = bus.last_hour("orders")
    assert [mark.version for mark in hour.marks] == ["9b4c"]
    assert {minute.settled for minute in hour.minutes} == {0}, "workers were there, and settled nothing"
