"""A sync handler that returns an awaitable: it is awaited on the worker's event loop, as an attempt like any."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import AsyncHandlerContext, CommandBus, CommandStatus, HandlerRegistry, Worker
from support.waiting import one, until, until_settled, verdicts

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
SHORT = {"task_timeout": 0.4, "cancel_grace": 0.4, "max_attempts": 1}


def returning(work: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A plain function that hands its arguments to an async one."""
    return lambda command, ctx: work(command, ctx)


def last(bus: CommandBus, command_id: str) -> Any:
    return bus.get_attempts("orders", command_id)[-1]


@pytest.mark.parametrize("has_async_handlers", [False, True])
def test_it_is_awaited_on_the_workers_loop(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    has_async_handlers: bool,
) -> None:
    db.execute("CREATE TABLE shipped (order_no int)")
    loops: list[Any] = []

    async def ship(command: Any, ctx: AsyncHandlerContext) -> None:
        loops.append(asyncio.get_running_loop())
        assert isinstance(ctx, AsyncHandlerContext)
        await ctx.sleep(0.01)
        async with ctx.transaction() as tx:
            await tx.execute("INSERT INTO shipped VALUES (%s)", [command.data])
            tx.complete({"shipped": command.data})

    async def native(ctx: Any) -> None:
        loops.append(asyncio.get_running_loop())

    handlers.register("orders", "ship", returning(ship))
    if has_async_handlers:
        handlers.register("orders", "native", native)
        bus.send("orders", "native")
    for number in range(5):
        bus.send("orders", "ship", number, command_id=f"s{number}")
    start_worker(handlers, concurrency=2)
    until_settled(db)
    assert len(set(loops)) == 1, "clients that are bound to their loop can be kept"
    assert one(db, "SELECT count(*) FROM shipped") == 5
    assert bus.get_command("orders", "s3").result == {"shipped": 3}  # type: ignore[union-attr]


def test_results_and_errors_are_the_handlers(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    async def answer(command: Any, ctx: Any) -> Any:
        return {"twice": 2 * command.data}

    async def fail(command: Any, ctx: Any) -> None:
        raise LookupError("no such order")

    class Ready:
        """An awaitable that is no coroutine."""

        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return "ready"

    async def leave(command: Any, ctx: Any) -> None:
        raise SystemExit(3)

    handlers.register("orders", "answer", functools.partial(lambda f, command, ctx: f(command, ctx), answer))
    handlers.register("orders", "fail", returning(fail))
    handlers.register("orders", "ready", lambda ctx: Ready())
    handlers.register("orders", "leave", returning(leave))
    for kind in ("answer", "fail", "ready", "leave"):
        bus.send("orders", kind, 21, command_id=kind, max_attempts=1)
    start_worker(handlers)
    until_settled(db)
    assert bus.get_command("orders", "answer").result == {"twice": 42}  # type: ignore[union-attr]
    assert bus.get_command("orders", "ready").result == "ready"  # type: ignore[union-attr]
    failed = last(bus, "fail")
    assert (failed.error_type, failed.error) == ("LookupError", "no such order")
    assert "in fail" in failed.traceback
    assert "slot_loop" not in failed.traceback
    assert last(bus, "leave").error_type == "SystemExit"


def test_a_deadline_and_a_person_cancel_it(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    began, told = threading.Event(), []

    async def wait(command: Any, ctx: Any) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.append((command.command_id, ctx.canceled.is_set()))

    handlers.register("orders", "late", returning(wait), timeout=0.3)
    handlers.register("orders", "long", returning(wait), timeout=0)
    bus.send("orders", "late", command_id="late", max_attempts=1)
    start_worker(handlers, concurrency=1, cancel_grace=5.0)
    until_settled(db)
    assert (last(bus, "late").error_code, last(bus, "late").rung) == ("TIMEOUT", "deadline")
    began.clear()
    bus.send("orders", "long", command_id="long")
    assert began.wait(60)
    bus.cancel("orders", "long", operator="ann")
    until_settled(db)
    assert bus.get_command("orders", "long").status is CommandStatus.CANCELED  # type: ignore[union-attr]
    assert told == [("late", True), ("long", True)]


def test_one_that_swallows_its_cancel_is_stuck_and_its_slot_comes_back(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    async def swallow(command: Any, ctx: Any) -> None:
        while not go_on.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    handlers.register("orders", "swallow", returning(swallow))
    handlers.register("orders", "quick", lambda ctx: "quick")
    bus.send("orders", "swallow", command_id="c")
    worker = start_worker(handlers, **SHORT | {"concurrency": 1})
    until_settled(db)
    stuck = last(bus, "c")
    assert (stuck.error_type, stuck.rung) == ("ExecutionStuck", "stuck")
    assert any("swallow" in frame for stack in stuck.autopsy["stacks"] for frame in stack["frames"])
    bus.send("orders", "quick", command_id="next")
    until_settled(db)
    assert bus.get_command("orders", "next").result == "quick"  # type: ignore[union-attr]

    def slots() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith(f"{worker.id}-slot")]

    until(lambda: len(slots()) == 1, what=slots)


def test_one_that_blocks_the_loop_is_given_up_with_it(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    beside = threading.Event()

    async def block(command: Any, ctx: Any) -> None:
        go_on.wait(30)  # not awaited: the loop stands still

    async def bystander(command: Any, ctx: Any) -> str:
        if not beside.is_set():
            beside.set()
            await asyncio.sleep(30)
        return "done"

    handlers.register("orders", "block", returning(block), timeout=0.4)
    handlers.register("orders", "bystander", returning(bystander), timeout=20)
    bus.send("orders", "bystander", command_id="b", max_attempts=1)
    start_worker(handlers, cancel_grace=0.4, concurrency=2)
    assert beside.wait(60)
    bus.send("orders", "block", command_id="block", max_attempts=1)
    until_settled(db)
    assert last(bus, "block").error_type == "ExecutionStuck"
    stopped = verdicts(db, "b")  # once, or again if its next attempt met the loop before there was a new one
    assert {verdict for _, verdict in stopped} == {"WAIVED"}
    assert bus.get_command("orders", "b").result == "done"  # type: ignore[union-attr]
    bus.send("orders", "bystander", command_id="after", max_attempts=1)
    until_settled(db)
    assert bus.get_command("orders", "after").result == "done"  # type: ignore[union-attr]


def test_one_that_no_loop_takes_is_closed_and_its_command_is_retried(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """The loop is given up between the handler's return and the beginning of what it returned. Nobody awaits that
    then: it is closed without a warning."""
    returned: list[Any] = []

    async def late() -> str:
        return "done"

    def handler(command: Any, ctx: Any) -> Any:
        assert worker._runtime is not None
        lane = worker._runtime.dispatcher.loop
        if lane is not None and not returned:
            lane.bar(lane._loop)
        elif lane is not None:
            lane.abandon_loop(lane._loop)
        returned.append(late())
        return returned[-1]

    handlers.register("orders", "warm", returning(lambda command, ctx: late()))
    handlers.register("orders", "late", handler)
    worker = start_worker(handlers, concurrency=1)
    bus.send("orders", "warm")
    until_settled(db)
    bus.send("orders", "late", command_id="late", max_attempts=1)
    until_settled(db)
    assert verdicts(db, "late") == [(1, "WAIVED")]
    assert [inspect.getcoroutinestate(each) for each in returned] == [inspect.CORO_CLOSED] * 2
    assert bus.get_command("orders", "late").result == "done"  # type: ignore[union-attr]


def test_a_stop_cancels_it_and_returns(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    began = threading.Event()

    async def wait(command: Any, ctx: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    handlers.register("orders", "wait", returning(wait), timeout=0)
    bus.send("orders", "wait", command_id="c", max_attempts=1)
    worker = start_worker(handlers, cancel_grace=0.3)
    assert began.wait(60)
    assert worker.stop(wait=3).is_clean
    assert verdicts(db, "c") == [(1, "WAIVED")]
