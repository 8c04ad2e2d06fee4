"""ctx.transaction(): the handler's writes and the command's completion are one commit, exactly once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    AttemptFencedError,
    CommandBus,
    CommandRecord,
    CommandStatus,
    HandlerRegistry,
    NewCommand,
    TransactionUsedError,
    Worker,
)
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.history import list_attempts
from support.waiting import one, until, until_settled, verdicts
from support.workers import AT_ONCE, add, done, either, opened

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
INSERT = "INSERT INTO ledger VALUES (%s, %s)"


@pytest.fixture(autouse=True)
def ledger(db: Db) -> None:
    """A table of the application's own."""
    db.execute("CREATE TABLE ledger (command_id text, attempt integer)")


def rows(db: Db) -> list[tuple[str, int]]:
    return [(name, number) for name, number in db.execute("SELECT * FROM ledger ORDER BY 1, 2")]


def status(db: Db, command_id: str) -> str:
    found: str = one(db, "SELECT status::text FROM commandbus.command WHERE command_id = %s", command_id)
    return found


def record(bus: CommandBus, command_id: str) -> CommandRecord:
    found = bus.get_command("orders", command_id)
    assert found is not None
    return found


def test_writes_and_completion_are_one_commit(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[Any] = []

    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
            tx.complete({"kept": [1, "ü"]})
            seen.append((rows(db), status(db, command.command_id)))
        seen.append((rows(db), status(db, command.command_id)))

    add(handlers, lane, "work", work)
    bus.create_queue("answers")
    bus.send("orders", "work", command_id="c", reply_to="answers")
    worker = start_worker(handlers)
    until(lambda: len(seen) == 2)
    assert seen == [([], "PENDING"), ([("c", 1)], "COMPLETED")]
    found = record(bus, "c")
    assert (found.result, found.attempts, found.worker) == ({"kept": [1, "ü"]}, 1, worker.id)
    assert found.started_at is not None
    assert one(db, "SELECT message -> 'result' FROM pgmq.q_answers") == {"kept": [1, "ü"]}
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0
    assert worker.stop().settled == 1


def test_an_exception_in_the_block_takes_the_writes_back_and_is_retried(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
            if ctx.attempt < 3:
                raise RuntimeError("not yet")

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    assert rows(db) == [("c", 3)]
    assert verdicts(db, "c") == [(1, "RETRY"), (2, "RETRY")]
    assert record(bus, "c").result is None


def test_a_swallowed_sql_error_does_not_complete_the_command(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
            if ctx.attempt == 1:
                with contextlib.suppress(psycopg.Error):
                    await done(tx.execute("SELECT 1 / 0"))

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    assert rows(db) == [("c", 2)]
    assert verdicts(db, "c") == [(1, "RETRY")]


def test_a_second_block_is_refused_and_noted(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    raised: list[BaseException] = []

    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, 1)))
        try:
            async with either(ctx.transaction()) as tx:
                await done(tx.execute(INSERT, (command.command_id, 2)))
        except TransactionUsedError as error:
            raised.append(error)
            raise

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until(lambda: verdicts(db, "c") == [(1, "NOTE")])
    assert raised
    assert rows(db) == [("c", 1)]
    assert record(bus, "c").status is CommandStatus.COMPLETED


def test_a_block_that_failed_may_be_entered_again(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        try:
            async with either(ctx.transaction()) as tx:
                await done(tx.execute(INSERT, (command.command_id, 1)))
                raise LookupError
        except LookupError:
            async with either(ctx.transaction()) as tx:
                await done(tx.execute(INSERT, (command.command_id, 2)))

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers)
    until_settled(db)
    assert rows(db) == [("c", 2)]
    assert verdicts(db, "c") == []


def test_an_exception_after_the_commit_is_a_note_and_never_a_retry(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
            tx.complete("done")
        raise RuntimeError("afterthought")

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    worker = start_worker(handlers, retry_policy=AT_ONCE)
    until(lambda: verdicts(db, "c") == [(1, "NOTE")])
    (note,) = bus.run(list_attempts("orders", "c"))
    assert (note.error_type, note.error) == ("RuntimeError", "afterthought")
    assert "afterthought" in (note.traceback or "")
    found = record(bus, "c")
    assert (found.status, found.result, found.error) == (CommandStatus.COMPLETED, "done", None)
    assert rows(db) == [("c", 1)]
    assert worker.stop().is_clean


def test_a_value_returned_after_the_commit_is_not_the_result(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(command: Any, ctx: Any) -> str:
        async with either(ctx.transaction()) as tx:
            tx.complete("by tx")
        return "returned"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    with caplog.at_level(logging.WARNING, "commandbus.worker"):
        start_worker(handlers)
        until(lambda: any("tx.complete" in each.getMessage() for each in caplog.records))
    assert record(bus, "c").result == "by tx"


def test_a_result_that_is_no_json_rolls_back(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
            tx.complete(object())

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c", max_attempts=1)
    start_worker(handlers)
    until_settled(db)
    assert rows(db) == []
    assert record(bus, "c").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
    assert "result is not JSON" in (record(bus, "c").error or "")


def test_without_its_fence_nothing_of_the_block_is_committed(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    started = threading.Event()
    raised: list[BaseException] = []

    async def work(command: Any, ctx: Any) -> None:
        try:
            async with either(ctx.transaction()) as tx:
                await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
                started.set()
                await opened(go_on)
        except AttemptFencedError as error:
            raised.append(error)
            raise

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    worker = start_worker(handlers)
    assert started.wait(60)
    with db.transaction():  # or the worker itself would be faster
        db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s'")
        bus.run(claim(domain="orders", worker="thief", n=1, lease_seconds=60, cursor=None), db)
    go_on.set()
    until(lambda: raised)
    worker.stop()
    assert "attempt number 1 of command 'c'" in str(raised[0])
    assert rows(db) == []
    assert one(db, "SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands") == "thief"
    assert verdicts(db, "c") == []


def test_a_swallowed_fence_error_does_not_complete_the_command(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> str:
        try:
            async with either(ctx.transaction()) as tx:
                await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
                db.execute("UPDATE pgmq.q_orders__commands SET read_ct = read_ct + 1")
        except AttemptFencedError:
            pass
        return "pretended"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    worker = start_worker(handlers)
    until(lambda: worker.settled == 1)
    assert rows(db) == []
    assert record(bus, "c").status is CommandStatus.IN_PROGRESS


def test_a_command_sent_in_the_transaction_is_part_of_it(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        sender: Any = CommandBus(database) if lane == "sync" else AsyncCommandBus(database)
        try:
            async with either(ctx.transaction()) as tx:
                child = f"{command.command_id}-{ctx.attempt}"
                await done(sender.send("orders", "child", ctx.attempt, command_id=child, conn=tx))
                await done(sender.send_many("orders", [NewCommand("child", command_id=f"{child}-many")], conn=tx))
                if ctx.attempt == 1:
                    raise RuntimeError("nothing was sent")
        finally:
            await done(sender.close())

    async def child(command: Any, ctx: Any) -> None: ...

    add(handlers, lane, "work", work)
    add(handlers, lane, "child", child)
    bus.send("orders", "work", command_id="p")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    sent = [row[0] for row in db.execute("SELECT command_id FROM commandbus.command ORDER BY 1")]
    assert sent == ["p", "p-2", "p-2-many"]


def test_the_commit_waits_for_a_row_that_somebody_holds(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """A renewal or an operator may hold the queue row at that moment: it is not lost."""
    locked = threading.Event()
    ready = threading.Event()

    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
            ready.set()
            await opened(locked)

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers)
    assert ready.wait(60)
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        locked.set()
        until(
            lambda: one(
                db,
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND wait_event_type = 'Lock'",
            )
        )
        assert rows(db) == []
        other.rollback()
    until_settled(db)
    assert rows(db) == [("c", 1)]
    assert verdicts(db, "c") == []


def test_many_at_once_happen_exactly_once(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))

    add(handlers, "sync", "sync", work)
    add(handlers, "async", "async", work)
    bus.send_many("orders", [NewCommand("sync" if n % 2 else "async", command_id=f"c{n:03}") for n in range(300)])
    for _ in range(2):
        start_worker(handlers, concurrency=4)
    until_settled(db)
    assert rows(db) == [(f"c{n:03}", 1) for n in range(300)]
