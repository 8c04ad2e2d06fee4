"""Workers and batches: what they settle is folded, what others left is swept, cancelling reaches what runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import psycopg
import pytest

from commandbus import (
    BatchStatus,
    BusinessRuleException,
    CommandBus,
    HandlerRegistry,
    NewCommand,
    OnComplete,
    PermanentCommandError,
    TroubleshootingQueue,
    Worker,
)
from commandbus.db.drivers import run
from commandbus.flow.batches.operate import mark
from commandbus.flow.commands import operate
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.settle import settle
from commandbus.worker.execution.attempt import Attempt
from support.databases import another_session
from support.waiting import one, until
from support.workers import add, done, either, opened, quick_settings

Db = psycopg.Connection[Any]


@pytest.fixture
def completions(handlers: HandlerRegistry) -> list[Any]:
    """What the handler of the completion was given; it is registered for `Done`."""
    found: list[Any] = []

    @handlers.handler("orders", "Done")
    def batch_is_done(command: Any, ctx: Any) -> None:
        found.append(command.data)

    return found


def test_a_batch_from_its_creation_to_its_callback(
    bus: CommandBus, handlers: HandlerRegistry, lane: str, start_worker: Any, completions: list[Any]
) -> None:
    async def ship(command: Any, ctx: Any) -> Any:
        if command.data == 7:
            raise BusinessRuleException("no")
        return command.data

    add(handlers, lane, "Ship", ship)
    done_handler = handlers.get("orders", "Done")
    assert done_handler is not None
    start_worker(handlers)
    bus.create_batch(
        "orders", [NewCommand("Ship", n) for n in range(200)], batch_id="b", on_complete=done_handler.function
    )
    seen: list[int] = []
    record = bus.wait_for_batch("orders", "b", wait=20, on_progress=lambda record: seen.append(record.finished))
    assert (record.status, record.completed, record.failed) == (BatchStatus.COMPLETED_WITH_FAILURES, 199, 1)
    assert seen[-1] == 200
    assert seen == sorted(seen)
    until(lambda: completions)
    assert (completions[0]["batch_id"], completions[0]["completed"]) == ("b", 199)
    assert len(completions) == 1


def test_members_that_complete_in_their_own_transaction(
    bus: CommandBus, handlers: HandlerRegistry, lane: str, start_worker: Any
) -> None:
    """The settler never sees their outcome; it folds their batch all the same, long before anybody sweeps."""

    async def ship(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute("SELECT 1"))

    add(handlers, lane, "Ship", ship)
    start_worker(handlers)
    for number in range(3):
        began = time.monotonic()
        bus.create_batch("orders", [NewCommand("Ship")] * 3, batch_id=f"b{number}")
        bus.wait_for_batch("orders", f"b{number}", wait=20)
        if time.monotonic() - began < 1:
            return
    pytest.fail("folded by the sweep alone")


def test_many_small_batches(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Any, completions: list[Any]
) -> None:
    handlers.register("orders", "Ship", lambda ctx: None)
    for number in range(300):
        bus.create_batch(
            "orders", [NewCommand("Ship")] * 2, batch_id=f"b{number}", on_complete=OnComplete("orders", "Done")
        )
    start_worker(handlers)
    start_worker(handlers)
    until(lambda: len(completions) == 300, 30)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.batch WHERE status = 'COMPLETED'") == 300)
    assert sorted(item["batch_id"] for item in completions) == sorted(f"b{number}" for number in range(300))


def test_two_workers_on_one_batch(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: Any, completions: list[Any]
) -> None:
    handlers.register("orders", "Ship", lambda ctx: None)
    start_worker(handlers)
    start_worker(handlers)
    members = [NewCommand("Ship") for _ in range(5000)]
    bus.create_batch("orders", members, batch_id="b", on_complete=OnComplete("orders", "Done"))
    record = bus.wait_for_batch("orders", "b", wait=30)
    assert (record.status, record.completed) == (BatchStatus.COMPLETED, 5000)
    until(lambda: completions)
    assert len(completions) == 1


def test_a_worker_sweeps_what_another_has_left(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Any, completions: list[Any]
) -> None:
    """One was killed between its settlement and its fold, one who canceled between two bites."""
    bus.create_batch("orders", [NewCommand("Ship")] * 2, batch_id="b", on_complete=OnComplete("orders", "Done"))
    found = run(db, claim(domain="orders", worker="dead", n=2, lease_seconds=60, cursor=None))
    attempts = [Attempt("orders", row, None, 0.0) for row in found.ready]
    run(db, settle("orders", "dead", [attempt.complete(None) for attempt in attempts]))
    bus.create_domain("idle")
    bus.create_batch("idle", [NewCommand("Ship")] * 3, batch_id="c", on_complete=OnComplete("orders", "Done"))
    bus.run(mark("idle", "c", operate.operator_action("ann", action="CANCEL")))
    start_worker(handlers)
    assert bus.wait_for_batch("orders", "b", wait=20).status == BatchStatus.COMPLETED
    assert bus.wait_for_batch("idle", "c", wait=20).status == BatchStatus.CANCELED
    until(lambda: len(completions) == 2)


def test_cancelling_reaches_what_runs(
    bus: CommandBus, handlers: HandlerRegistry, lane: str, start_worker: Any, completions: list[Any]
) -> None:
    """Two run: one stops when asked, one completes within its grace. One needs a person, the others wait."""
    started = threading.Semaphore(0)
    asked = threading.Event()

    async def ship(command: Any, ctx: Any) -> str:
        if command.data == "broken":
            raise PermanentCommandError("no")
        started.release()
        if command.data == "stubborn":
            with contextlib.suppress(asyncio.CancelledError):
                await opened(asked)
            return "done"
        while True:
            await done(ctx.sleep(0.01))

    add(handlers, lane, "Ship", ship)
    start_worker(handlers, concurrency=2, cancel_grace=5.0)
    data = ["broken", "obedient", "stubborn", *["waiting"] * 50]
    members = [NewCommand("Ship", item, f"{number}") for number, item in enumerate(data)]
    bus.create_batch("orders", members, batch_id="b", on_complete=OnComplete("orders", "Done"))
    for _ in range(2):
        assert started.acquire(timeout=20)
    until(lambda: TroubleshootingQueue(bus).count("orders") == 1)
    report = bus.cancel_batch("orders", "b", operator="ann")
    assert report.canceled + report.requested == 53
    assert report.requested >= 2, "what was claimed and has not started is asked too"
    asked.set()
    record = bus.wait_for_batch("orders", "b", wait=20)
    assert record.status == BatchStatus.CANCELED
    assert (record.completed, record.canceled, record.in_tsq) == (1, 52, 0)
    until(lambda: completions)
    assert completions[0]["status"] == "CANCELED"


def test_the_last_fold_comes_before_the_end(bus: CommandBus, database: str, handlers: HandlerRegistry) -> None:
    handlers.register("orders", "Ship", lambda ctx: None)
    bus.create_batch("orders", [NewCommand("Ship")] * 100, batch_id="b")
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    record = bus.get_batch("orders", "b")
    assert record is not None
    assert record.status == BatchStatus.COMPLETED


def _settled_by_nobody(bus: CommandBus, db: Db, batch_id: str, **options: Any) -> None:
    """A batch whose only member was settled by a worker that died before it folded; no other serves it."""
    bus.create_domain("idle")
    bus.create_batch("idle", [NewCommand("Ship")], batch_id=batch_id, **options)
    found = run(db, claim(domain="idle", worker="dead", n=1, lease_seconds=60, cursor=None))
    run(db, settle("idle", "dead", [Attempt("idle", row, None, 0.0).complete(None) for row in found.ready]))


def test_a_batch_that_is_refused_delays_no_other(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Any, completions: list[Any]
) -> None:
    """Somebody's open transaction is about to use the command_id of its completion."""
    handlers.register("orders", "Ship", lambda ctx: None)
    completion = OnComplete("orders", "Done", command_id="mine")
    with another_session(db) as conn:
        bus.send("orders", "Other", command_id="mine", conn=conn)
        start_worker(handlers)
        bus.create_batch("orders", [NewCommand("Ship")], batch_id="refused", on_complete=completion)
        until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 1)
        seconds = []
        for number in range(8):
            began = time.monotonic()
            bus.create_batch("orders", [NewCommand("Ship")], batch_id=f"b{number}")
            bus.wait_for_batch("orders", f"b{number}", wait=20)
            seconds.append(time.monotonic() - began)
        assert sorted(seconds)[4] < 2, f"the refused one waits for twice as long: {seconds}"
        conn.rollback()
    assert bus.wait_for_batch("orders", "refused", wait=40).status == BatchStatus.COMPLETED
    until(lambda: completions)


def test_a_batch_that_is_refused_stops_no_sweep(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Any
) -> None:
    handlers.register("orders", "Ship", lambda ctx: None)
    with another_session(db) as conn:
        bus.send("orders", "Other", command_id="mine", conn=conn)
        _settled_by_nobody(bus, db, "refused", on_complete=OnComplete("orders", "Done", command_id="mine"))
        start_worker(handlers)
        for number in range(3):
            _settled_by_nobody(bus, db, f"b{number}")
            assert bus.wait_for_batch("idle", f"b{number}", wait=20).status == BatchStatus.COMPLETED
        conn.rollback()


def test_no_batch_ends_a_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is raised while one is folded, by the settler and by the keeper."""
    handlers.register("orders", "Ship", lambda ctx: None)
    _settled_by_nobody(bus, db, "left", on_complete=OnComplete("orders", "Done"))
    bus.create_batch("orders", [NewCommand("Ship")] * 2, batch_id="own", on_complete=OnComplete("orders", "Done"))
    db.execute("UPDATE commandbus.batch SET on_complete = '[1, 2]'")
    worker = start_worker(handlers)
    until(lambda: "cannot be folded now" in caplog.text and "cannot be checked now" in caplog.text)
    _settled_by_nobody(bus, db, "swept")
    bus.create_batch("orders", [NewCommand("Ship")] * 3, batch_id="plain")
    for domain, batch_id in (("idle", "swept"), ("orders", "plain")):
        assert bus.wait_for_batch(domain, batch_id, wait=20).status == BatchStatus.COMPLETED
    worker.stop()


def test_a_batch_that_cannot_be_folded_keeps_nobody_from_settling(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Any
) -> None:
    """Somebody has locked its row, then its table: outcomes are written, and folded when that is over."""
    handlers.register("orders", "Ship", lambda ctx: None)
    start_worker(handlers)
    bus.create_batch("orders", [NewCommand("Ship")] * 10, batch_id="b", is_open=True)
    until(lambda: one(db, "SELECT completed FROM commandbus.batch") == 10)
    with another_session(db) as conn:
        conn.execute("SELECT FROM commandbus.batch FOR NO KEY UPDATE")
        bus.add_to_batch("orders", "b", [NewCommand("Ship")] * 10)
        until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 20)
        assert one(db, "SELECT completed FROM commandbus.batch") == 10
        conn.rollback()
    until(lambda: one(db, "SELECT completed FROM commandbus.batch") == 20)
    db.execute("ALTER TABLE commandbus.batch ADD CONSTRAINT no CHECK (completed <= 20)")
    bus.add_to_batch("orders", "b", [NewCommand("Ship")] * 10)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 30)
    bus.create_batch("orders", [NewCommand("Ship")] * 3, batch_id="neighbour")
    assert bus.wait_for_batch("orders", "neighbour", wait=20).status == BatchStatus.COMPLETED
    db.execute("ALTER TABLE commandbus.batch DROP CONSTRAINT no")
    record = bus.get_batch("orders", "b")
    assert record is not None
    assert (record.completed, record.total) == (30, 30), "what is not folded is counted all the same"
