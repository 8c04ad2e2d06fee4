"""on_start, on_stop and lifespan of a worker, and the state that its handlers share."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from commandbus import AsyncWorker, CommandBus, ConfigurationError, HandlerRegistry, Worker, WorkerStartError
from commandbus.worker.runtime import WorkerRuntime
from support.waiting import until, until_settled
from support.workers import quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def test_they_run_around_the_attempts_and_share_one_state(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    did: list[Any] = []

    @handlers.on_start
    def first(state: Any) -> None:
        did.append("first")
        state.seen = []
        assert not state.is_child

    @handlers.lifespan
    async def loop_bound(state: Any) -> AsyncIterator[None]:
        state.loop = asyncio.get_running_loop()
        did.append("enter")
        yield
        assert asyncio.get_running_loop() is state.loop
        did.append(("leave", len(state.seen)))

    @handlers.lifespan
    def files(state: Any) -> Iterator[None]:
        did.append("open")
        yield
        did.append("close")

    @handlers.on_stop
    async def last(state: Any) -> None:
        did.append("last")

    @handlers.handler("orders", "sync")
    def sync(command: Any, ctx: Any) -> None:
        ctx.state.seen.append(command.command_type)

    @handlers.handler("orders", "async")
    async def asynchronous(command: Any, ctx: Any) -> None:
        assert asyncio.get_running_loop() is ctx.state.loop
        ctx.state.seen.append(command.command_type)

    for kind in ("sync", "async") * 3:
        bus.send("orders", kind)
    worker = start_worker(handlers)
    assert did == ["first", "enter", "open"]
    until_settled(db)
    with pytest.raises(AttributeError, match=r"the state of this worker has no 'mailer'; set it in .*on_start"):
        _ = worker._runtime._lifespans.state.mailer  # type: ignore[union-attr]
    worker.stop()
    assert did == ["first", "enter", "open", "last", "close", ("leave", 6)]
    worker.start()  # again, with a new state
    worker.stop()
    assert did[6:] == ["first", "enter", "open", "last", "close", ("leave", 0)]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_failing_start_claims_nothing_and_leaves_nothing(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, kind: str
) -> None:
    did: list[str] = []

    @handlers.lifespan
    def opened(state: Any) -> Iterator[None]:
        yield
        did.append("closed")

    def fail(state: Any) -> None:
        raise ConnectionRefusedError("no mail server at mx:25")

    async def fail_async(state: Any) -> None:
        fail(state)

    handlers.on_start(fail if kind == "sync" else fail_async)
    handlers.on_stop(lambda state: did.append("never"))
    handlers.register("orders", "ship", lambda ctx: None)
    handlers.register("orders", "bill", fail_async)
    sent = bus.send("orders", "ship")
    before = threading.active_count()
    with pytest.raises(
        WorkerStartError, match=r"on_start .*fail.* at .*test_lifespans\.py:\d+, so .* no mail server"
    ):
        start_worker(handlers)
    assert did == ["closed"]
    until(lambda: threading.active_count() <= before)
    assert bus.get_attempts("orders", sent.command_id).items == []
    assert db.execute("SELECT count(*) FROM commandbus.worker").fetchone() == (0,)


def test_a_stop_that_comes_during_the_start(
    bus: CommandBus, database: str, handlers: HandlerRegistry, go_on: threading.Event
) -> None:
    """An async on_start is canceled, and what had started is stopped."""
    began, did = threading.Event(), []
    handlers.register("orders", "ship", lambda ctx: None)

    @handlers.lifespan
    def opened(state: Any) -> Iterator[None]:
        yield
        did.append("closed")

    @handlers.on_start
    async def hang(state: Any) -> None:
        began.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            did.append("canceled")
            raise

    worker = Worker(handlers, settings=quick_settings(database))
    threading.Thread(target=lambda: began.wait(20) and worker.request_stop("enough")).start()
    assert worker.start() is False
    assert worker.state == "STOPPED"
    until(lambda: sorted(did) == ["canceled", "closed"])


def test_a_hanging_or_failing_stop_does_not_hold_up_the_others(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    did: list[str] = []
    handlers.register("orders", "ship", lambda ctx: None)
    handlers.on_stop(lambda state: did.append("first"))

    @handlers.on_stop
    def fails(state: Any) -> None:
        raise TimeoutError("the mail server does not answer")

    @handlers.on_stop
    def hangs(state: Any) -> None:
        go_on.wait(60)

    @handlers.on_stop
    async def hangs_async(state: Any) -> None:
        await asyncio.sleep(600)

    worker = start_worker(handlers)
    began = time.monotonic()
    with caplog.at_level(logging.ERROR, "commandbus"):
        report = worker.stop(wait=1)
    assert report.is_clean
    assert time.monotonic() - began < 8
    assert did == ["first"]
    texts = " ".join(record.getMessage() for record in caplog.records)
    assert "hangs has not ended within 1 s: it is left behind" in texts
    assert "hangs_async has not ended" in texts
    assert "fails failed" in texts


def test_after_a_blocked_loop_async_functions_start_again_on_the_new_one(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    starts: list[Any] = []

    @handlers.on_start
    def once(state: Any) -> None:
        starts.append("sync")

    @handlers.lifespan
    async def session(state: Any) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        state.loop = asyncio.get_running_loop()
        starts.append(state.loop)
        yield
        starts.append(("closed", asyncio.get_running_loop() is state.loop))

    @handlers.handler("orders", "block", timeout=0.3)
    async def block(command: Any, ctx: Any) -> None:
        go_on.wait(60)

    @handlers.handler("orders", "use")
    async def use(command: Any, ctx: Any) -> bool:
        return asyncio.get_running_loop() is ctx.state.loop

    worker = start_worker(handlers, cancel_grace=0.2)
    bus.send("orders", "block", max_attempts=1)
    until_settled(db)
    sent = [bus.send("orders", "use") for _ in range(10)]
    assert [each.wait() for each in sent] == [True] * 10
    first, second = starts[1:]
    assert starts[0] == "sync"
    assert first is not second
    worker.stop()
    assert starts[3:] == [("closed", True)]


def test_a_failing_start_on_the_new_loop_ends_the_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    starts: list[int] = []

    @handlers.on_start
    async def session(state: Any) -> None:
        starts.append(1)
        if len(starts) > 1:
            raise ConnectionRefusedError("gone")

    @handlers.handler("orders", "block", timeout=0.3)
    async def block(command: Any, ctx: Any) -> None:
        go_on.wait(60)

    worker = start_worker(handlers, cancel_grace=0.2)
    bus.send("orders", "block", max_attempts=1)
    worker.wait()
    with pytest.raises(WorkerStartError, match=r"on_start .*session failed .* gone"):
        worker.stop()


def test_on_the_loop_of_the_application(
    bus: CommandBus, database: str, handlers: HandlerRegistry, go_on: threading.Event
) -> None:
    did: list[Any] = []
    here = asyncio.new_event_loop()

    @handlers.lifespan
    async def session(state: Any) -> AsyncIterator[None]:
        did.append(asyncio.get_running_loop() is here)
        yield
        did.append(asyncio.get_running_loop() is here)

    @handlers.handler("orders", "block", timeout=0.3)
    async def block(command: Any, ctx: Any) -> None:
        go_on.wait(60)  # blocks the loop, until the attempt is given up

    def release() -> None:
        until(lambda: bus.get_attempts("orders", "b").items)
        go_on.set()

    @handlers.handler("orders", "ship")
    async def ship(command: Any, ctx: Any) -> str:
        return "shipped"

    async def run() -> None:
        settings = quick_settings(database, cancel_grace=0.2)
        async with AsyncWorker(handlers, on_callers_loop=True, settings=settings):
            assert did == [True]
            threading.Thread(target=release).start()
            blocked = await asyncio.to_thread(bus.send, "orders", "block", command_id="b", max_attempts=1)
            await asyncio.to_thread(bus.wait_all, [blocked])
            sent = await asyncio.to_thread(bus.send, "orders", "ship")
            assert await asyncio.to_thread(sent.wait) == "shipped"
            assert did == [True], "the loop is the same"

    with closing(here):
        here.run_until_complete(run())
    assert did == [True, True]


def test_included_registries_bring_theirs_once(bus: CommandBus, start_worker: StartWorker) -> None:
    did: list[str] = []
    outer, inner = HandlerRegistry(), HandlerRegistry()
    outer.register("orders", "outer", lambda ctx: ctx.state.by)
    inner.register("orders", "inner", lambda ctx: ctx.state.by)

    def shared(state: Any) -> None:
        did.append("shared")

    outer.on_start(shared)
    inner.on_start(shared)

    @inner.lifespan
    def own(state: Any) -> Iterator[None]:
        state.by = "inner"
        yield
        did.append("closed")

    outer.include(inner)
    worker = start_worker(outer)
    assert [bus.send("orders", name).wait() for name in ("inner", "outer")] == ["inner", "inner"]
    worker.stop()
    assert did == ["shared", "closed"]


def test_bad_functions_are_refused_by_name(handlers: HandlerRegistry, start_worker: StartWorker) -> None:
    with pytest.raises(TypeError, match=r"takes \(\); it must take \(state\)"):
        handlers.on_start(lambda: None)
    with pytest.raises(TypeError, match="on_stop takes a function, not 7"):
        handlers.on_stop(7)  # type: ignore[type-var]

    def steps(state: Any) -> Iterator[None]:
        return
        yield

    with pytest.raises(TypeError, match="steps is a generator: on_start and on_stop take plain functions"):
        handlers.on_start(steps)
    with pytest.raises(TypeError, match="is no generator"):
        handlers.lifespan(lambda state: None)
    handlers.lifespan(steps)
    with pytest.raises(ConfigurationError, match="steps is registered twice"):
        handlers.lifespan(steps)
    handlers.register("orders", "ship", lambda ctx: None)
    with pytest.raises(WorkerStartError, match="steps ended without a `yield`"):
        start_worker(handlers)


def test_a_worker_without_them_has_no_loop_and_no_further_thread(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "ship", lambda ctx: None)
    runtime = start_worker(handlers)._runtime
    assert isinstance(runtime, WorkerRuntime)
    assert runtime.dispatcher.loop is None
    assert not any("loop" in thread.name for thread in threading.enumerate() if thread.name.startswith("test-"))
