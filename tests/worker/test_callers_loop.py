"""AsyncWorker(on_callers_loop=True): async handlers on the application's event loop, also when it is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg

from commandbus import AsyncWorker, CommandBus, CommandStatus, HandlerRegistry
from support.waiting import one, until, until_settled, verdicts
from support.workers import quick_settings

Db = psycopg.Connection[Any]


async def soon(condition: Callable[[], Any]) -> None:
    """Wait in a thread, so that the loop stays free."""
    await asyncio.to_thread(until, condition)


def play(
    handlers: HandlerRegistry, database: str, scene: Callable[[AsyncWorker], Awaitable[None]], **changes: Any
) -> None:
    """An application with a worker on its loop."""

    async def application() -> None:
        settings = quick_settings(database, **changes)
        worker = AsyncWorker(handlers, settings=settings, on_callers_loop=True)
        before = asyncio.all_tasks()
        async with worker:
            await scene(worker)
        assert asyncio.all_tasks() == before, "nothing of the worker stays on the loop"
        await asyncio.sleep(0)  # and the loop goes on

    asyncio.run(application())


def status(bus: CommandBus, command_id: str) -> CommandStatus:
    return bus.get_command("orders", command_id).status  # type: ignore[union-attr]


def is_done(bus: CommandBus, command_id: str) -> bool:
    return status(bus, command_id) is CommandStatus.COMPLETED


def test_handlers_use_the_applications_own_objects(
    bus: CommandBus, handlers: HandlerRegistry, database: str
) -> None:
    inbox: list[asyncio.Queue[int]] = []
    loops: list[Any] = []

    @handlers.handler("orders", "put")
    async def put(command: Any, ctx: Any) -> None:
        loops.append(asyncio.get_running_loop())
        async with ctx.transaction() as tx:
            await tx.execute("SELECT 1")
        await inbox[0].put(command.data)

    async def returned(command: Any, ctx: Any) -> None:
        await put(command, ctx)

    handlers.register("orders", "sync", lambda command, ctx: returned(command, ctx))
    for number in range(3):
        bus.send("orders", "put", number)
    bus.send("orders", "sync", 3)

    async def scene(worker: AsyncWorker) -> None:
        inbox.append(asyncio.Queue())
        assert sorted([await inbox[0].get() for _ in range(4)]) == [0, 1, 2, 3]
        assert set(loops) == {asyncio.get_running_loop()}
        await soon(lambda: bus.commands.count_by_status("orders") == {CommandStatus.COMPLETED: 4})

    play(handlers, database, scene)


def test_by_default_nothing_runs_on_the_applications_loop(
    bus: CommandBus, handlers: HandlerRegistry, database: str
) -> None:
    loops: list[Any] = []

    @handlers.handler("orders", "look")
    async def look(ctx: Any) -> None:
        loops.append(asyncio.get_running_loop())

    bus.send("orders", "look", command_id="c")

    async def application() -> None:
        async with AsyncWorker(handlers, settings=quick_settings(database)):
            await soon(lambda: status(bus, "c") is CommandStatus.COMPLETED)
        assert asyncio.get_running_loop() not in loops

    asyncio.run(application())


def test_one_that_awaits_is_canceled_at_its_deadline(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, database: str
) -> None:
    @handlers.handler("orders", "wait", timeout=0.3)
    async def wait(ctx: Any) -> None:
        await asyncio.Event().wait()

    @handlers.handler("orders", "swallow", timeout=0.3)
    async def swallow(ctx: Any) -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        ended.set()

    over, ended = threading.Event(), threading.Event()
    bus.send("orders", "wait", command_id="w", max_attempts=1)
    bus.send("orders", "swallow", command_id="s", max_attempts=1)

    async def scene(worker: AsyncWorker) -> None:
        await asyncio.to_thread(until_settled, db)
        await asyncio.to_thread(bus.send, "orders", "wait", command_id="next", max_attempts=1)
        await asyncio.to_thread(until_settled, db)
        over.set()
        # The swallower ends: it is the application's task as any other.
        assert await asyncio.to_thread(ended.wait, 20)

    play(handlers, database, scene, cancel_grace=0.4, concurrency=2)
    assert bus.get_attempts("orders", "w")[0].error_code == "TIMEOUT"
    assert bus.get_attempts("orders", "s")[0].error_type == "ExecutionStuck"


def test_a_handler_that_blocks_the_loop_blocks_the_application_and_nothing_else(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, database: str
) -> None:
    """Its attempt is settled while the loop still stands, nothing it does later is saved, the others go on."""
    db.execute("CREATE TABLE mark (text text)")
    release, late = threading.Event(), []

    @handlers.handler("orders", "block", timeout=0.4)
    async def block(ctx: Any) -> str:
        release.wait(60)
        try:
            async with ctx.transaction() as tx:
                await tx.execute("INSERT INTO mark VALUES ('too late')")
        except BaseException as error:
            late.append(type(error).__name__)
        return "too late"

    @handlers.handler("orders", "beside", timeout=30)
    async def beside(ctx: Any) -> str:
        started.set()
        if ctx.attempt_number == 1:
            await asyncio.sleep(30)
        return "second time"

    started = threading.Event()
    handlers.register("orders", "sync", lambda ctx: "went on")
    seen: dict[str, Any] = {}

    def outside() -> None:
        """What another program sees while the loop stands still."""
        bus.send("orders", "beside", command_id="beside", max_attempts=1)
        started.wait(20)
        bus.send("orders", "block", command_id="block", max_attempts=1)
        until(lambda: status(bus, "block") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
        bus.send("orders", "sync", command_id="sync")
        until(lambda: status(bus, "sync") is CommandStatus.COMPLETED)
        seen["first"], *seen["later"] = [verdict for _, verdict in verdicts(db, "beside")]
        seen["beside ran again"] = status(bus, "beside") is CommandStatus.COMPLETED
        seen["was released"] = release.is_set()
        release.set()

    async def scene(worker: AsyncWorker) -> None:
        await asyncio.to_thread(outside)
        await soon(lambda: status(bus, "beside") is CommandStatus.COMPLETED)
        assert worker.health_status.stuck_threads == 1

    play(handlers, database, scene, cancel_grace=0.4, concurrency=3)
    assert set(seen.pop("later")) <= {"GIVEN_BACK"}, (
        "it waited before slots that could not start: another's to take"
    )
    assert seen == {"first": "WAIVED", "beside ran again": False, "was released": False}
    stuck = bus.get_attempts("orders", "block")[0]
    assert stuck.error_type == "ExecutionStuck"
    assert any("release.wait" in frame for stack in stuck.autopsy["stacks"] for frame in stack["frames"])
    assert late == ["AttemptFencedError"]
    assert one(db, "SELECT count(*) FROM mark") == 0
    assert bus.get_command("orders", "beside").result == "second time"  # type: ignore[union-attr]


def test_an_application_that_blocks_its_loop_charges_nobody(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, database: str
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "work", timeout=0.5)
    async def work(ctx: Any) -> str:
        started.set()
        if ctx.attempt_number == 1:
            await asyncio.Event().wait()
        return "done"

    bus.send("orders", "work", command_id="c", max_attempts=1)

    async def scene(worker: AsyncWorker) -> None:
        await asyncio.to_thread(started.wait, 20)
        until(lambda: verdicts(db, "c"))  # on the loop: it stands still
        await soon(lambda: status(bus, "c") is CommandStatus.COMPLETED)
        assert worker.health_status.stuck_threads == 0

    play(handlers, database, scene, cancel_grace=0.4)
    assert verdicts(db, "c") == [(1, "WAIVED")]


def test_it_runs_and_stops_and_runs_again(bus: CommandBus, handlers: HandlerRegistry, database: str) -> None:
    @handlers.handler("orders", "work")
    async def work(ctx: Any) -> None:
        await asyncio.sleep(0)

    async def application() -> None:
        worker = AsyncWorker(handlers, settings=quick_settings(database), on_callers_loop=True)
        for number in range(2):
            running = asyncio.create_task(worker.run())
            await soon(lambda: worker.state == "ACTIVE")
            sent = await asyncio.to_thread(bus.send, "orders", "work", command_id=f"c{number}")
            await soon(functools.partial(is_done, bus, sent.command_id))
            began = time.monotonic()
            assert (await worker.stop()).is_clean
            assert time.monotonic() - began < 8
            await running

    asyncio.run(application())
