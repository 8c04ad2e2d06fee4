"""ctx.transaction() of a level that keeps its snapshot: nothing of ours may change its queue row meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

from commandbus import CommandBus, CommandRecord, CommandStatus, HandlerRegistry, NewCommand, Worker
from support.waiting import one, statuses, until, until_settled, verdicts
from support.workers import AT_ONCE, add, done, either, opened, short_lease

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
INSERT = "INSERT INTO ledger VALUES (%s)"
LEVELS = ["repeatable read", "serializable"]
LEASE = 1.5
LEFT = "SELECT extract(epoch FROM vt - clock_timestamp())::float8 FROM pgmq.q_orders__commands"
WRITTEN = "SELECT vt::text || headers::text FROM pgmq.q_orders__commands"


@pytest.fixture(autouse=True)
def ledger(db: Db) -> None:
    """A table of the application's own."""
    db.execute("CREATE TABLE ledger (command_id text)")


def record(bus: CommandBus, command_id: str = "c") -> CommandRecord:
    found = bus.get_command("orders", command_id)
    assert found is not None
    return found


async def a_lease(tx: Any, ctx: Any) -> None:
    """Work in the transaction for longer than the usual lease, which would be renewed three times."""
    end = monotonic() + 1.2 * LEASE
    while monotonic() < end:
        await done(ctx.sleep(0.05))
        await done(tx.execute("SELECT 1"))


@pytest.mark.parametrize(
    ("level", "prepared"),
    [("repeatable read", True), ("serializable", True), ("serializable", False)],
    ids=["repeatable_read", "serializable", "behind_a_pooler"],
)
def test_it_outlives_its_usual_lease(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    level: str,
    prepared: bool,
) -> None:
    seen: list[Any] = []

    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction(isolation=level)) as tx:
            cursor = await done(tx.execute("SELECT current_setting('transaction_isolation')"))
            seen.append(await done(cursor.fetchone()))
            await done(tx.execute(INSERT, (command.command_id,)))
            before = one(db, WRITTEN)
            left, wanted = one(db, LEFT), ctx.remaining()
            await a_lease(tx, ctx)
            seen.append((left > wanted, one(db, WRITTEN) == before))
            tx.complete("kept")

    add(handlers, lane, "work", work, timeout=20)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, prepared_statements=prepared, **short_lease())
    until_settled(db)
    assert seen == [(level,), (True, True)]
    assert (record(bus).status, record(bus).result) == (CommandStatus.COMPLETED, "kept")
    assert verdicts(db, "c") == []
    assert one(db, "SELECT count(*) FROM ledger") == 1


@pytest.mark.parametrize("prepared", [True, False], ids=["direct", "behind_a_pooler"])
def test_a_level_that_the_database_says_is_treated_the_same(
    bus: CommandBus,
    db: Db,
    database: str,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    prepared: bool,
) -> None:
    seen: list[Any] = []

    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            cursor = await done(tx.execute("SELECT current_setting('transaction_isolation')"))
            seen.append(await done(cursor.fetchone()))
            await a_lease(tx, ctx)

    add(handlers, lane, "work", work, timeout=20)
    bus.send("orders", "work", command_id="c")
    name = one(db, "SELECT quote_ident(current_database())")
    db.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'".encode())
    try:
        start_worker(handlers, prepared_statements=prepared, **short_lease())
        until_settled(db)
    finally:
        db.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation".encode())
    assert seen == [("repeatable read",)]
    assert (record(bus).status, verdicts(db, "c")) == (CommandStatus.COMPLETED, [])


def test_progress_waits_for_the_end_of_the_block(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    inside, outside = threading.Event(), threading.Event()

    async def work(command: Any, ctx: Any) -> None:
        try:
            async with either(ctx.transaction(isolation=IsolationLevel.REPEATABLE_READ)) as tx:
                await done(tx.execute(INSERT, (command.command_id,)))
                ctx.heartbeat({"page": 1})
                await a_lease(tx, ctx)
                with ThreadPoolExecutor(1) as beside:  # a sync bus is not for the thread of an event loop
                    assert beside.submit(record, bus).result(20).progress is None
                inside.set()
                raise RuntimeError("not in this way")
        except RuntimeError:
            outside.set()
            await opened(go_on)

    add(handlers, lane, "work", work, timeout=30)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, **short_lease())
    until(inside.is_set)
    until(lambda: record(bus).progress == {"page": 1})
    assert outside.is_set()
    go_on.set()
    until_settled(db)
    assert (record(bus).status, one(db, "SELECT count(*) FROM ledger")) == (CommandStatus.COMPLETED, 0)


def test_a_cancel_wins(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    """Whether the handler hears of it or is on its last line, nothing of it is committed."""
    inside = threading.Event()

    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction(isolation="serializable")) as tx:
            await done(tx.execute(INSERT, (command.command_id,)))
            inside.set()
            await opened(go_on)

    add(handlers, lane, "work", work, timeout=20)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE, cancel_grace=8)
    until(inside.is_set)
    bus.cancel("orders", "c", operator="ann")
    go_on.set()
    until_settled(db)
    assert record(bus).status is CommandStatus.CANCELED
    assert one(db, "SELECT count(*) FROM ledger") == 0


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_deadline_it_is_refused_at_once(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, level: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction(isolation=level)) as tx:
            await done(tx.execute(INSERT, (command.command_id,)))

    add(handlers, lane, "work", work, timeout=0)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    (attempt,) = bus.get_attempts("orders", "c")
    assert (attempt.verdict, attempt.error_code) == ("PERMANENT", "NO_DEADLINE")
    assert level in (attempt.error or "")
    assert "Give the handler a timeout" in (attempt.error or "")
    assert one(db, "SELECT count(*) FROM ledger") == 0


def test_its_deadline_cannot_move_inside(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        await done(ctx.extend(10))
        async with either(ctx.transaction(isolation="serializable")):
            with pytest.raises(ValueError, match=r"extend\(20s\): .*before ctx.transaction"):
                await done(ctx.extend(20))

    add(handlers, lane, "work", work, timeout=5)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers)
    until_settled(db)
    assert (record(bus).status, verdicts(db, "c")) == (CommandStatus.COMPLETED, [])


def test_a_level_that_was_set_behind_our_back_is_explained(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            await done(tx.execute(INSERT, (command.command_id,)))
            await a_lease(tx, ctx)

    add(handlers, lane, "work", work, timeout=20)
    bus.send("orders", "work", command_id="c", max_attempts=1)
    start_worker(handlers, **short_lease())
    until_settled(db)
    (attempt,) = bus.get_attempts("orders", "c")
    assert (attempt.verdict, attempt.error_code) == ("EXHAUSTED", "SERIALIZATION_FAILURE")
    assert "ctx.transaction(isolation=…)" in (attempt.error or "")
    assert "connection was lost" not in (attempt.error or "")
    assert one(db, "SELECT count(*) FROM ledger") == 0


@pytest.mark.parametrize("wrong", ["chaos", "", 7, b"serializable"])
def test_a_level_that_there_is_not(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, wrong: Any
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction(isolation=wrong)):
            raise AssertionError("never")

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c", max_attempts=1)
    start_worker(handlers)
    until_settled(db)
    (attempt,) = bus.get_attempts("orders", "c")
    assert attempt.error_type == "ValueError"
    assert repr(wrong) in (attempt.error or "")
    assert "'repeatable read', 'serializable'" in (attempt.error or "")


def test_the_pool_gets_its_connection_back_as_it_was(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[Any] = []

    async def work(command: Any, ctx: Any) -> None:
        level = command.data
        async with either(ctx.transaction(isolation=level)) as tx:
            cursor = await done(tx.execute("SELECT current_setting('transaction_isolation')"))
            seen.append(await done(cursor.fetchone()))

    add(handlers, lane, "work", work, timeout=20)
    for level in ("serializable", None, "repeatable_read", None):
        bus.send("orders", "work", level)
    start_worker(handlers, concurrency=1, pool_max_size=1)
    until_settled(db)
    assert seen == [("serializable",), ("read committed",), ("repeatable read",), ("read committed",)]


def test_many_members_of_a_batch_at_once(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """They complete side by side: what they have in common must be no conflict between their snapshots."""

    async def work(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction(isolation="repeatable read")) as tx:
            await done(tx.execute(INSERT, (command.command_id,)))

    add(handlers, lane, "work", work, timeout=30)
    batch = bus.create_batch("orders", [NewCommand("work", n) for n in range(60)])
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 60}
    assert one(db, "SELECT count(*) FROM ledger") == 60
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0
    until(lambda: bus.get_batch("orders", batch.batch_id).completed == 60)
