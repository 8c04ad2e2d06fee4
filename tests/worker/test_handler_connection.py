"""ctx.connection(): a plain connection out of one small pool, which no handler can spoil for the next."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool

from commandbus import (
    CommandBus,
    CommandStatus,
    ConnectionInUseError,
    HandlerRegistry,
    NewCommand,
    RetryPolicy,
    Worker,
)
from commandbus.flow.commands.history import list_attempts
from support.waiting import one, until, until_settled, verdicts
from support.workers import add, done, either, opened

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def ledger(db: Db) -> None:
    """A table of the application's own."""
    db.execute("CREATE TABLE ledger (command_id text, note text)")


def notes(db: Db) -> list[str]:
    return [row[0] for row in db.execute("SELECT note FROM ledger ORDER BY 1")]


def test_writes_are_committed_at_the_end_of_the_block(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[int] = []

    async def write(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            await done(conn.execute("INSERT INTO ledger VALUES (%s, 'first')", (command.command_id,)))
        seen.append(one(db, "SELECT count(*) FROM ledger"))
        async with either(ctx.connection()) as conn:
            await done(conn.execute("INSERT INTO ledger VALUES (%s, 'second')", (command.command_id,)))
            seen.append(one(db, "SELECT count(*) FROM ledger"))

    add(handlers, lane, "write", write)
    bus.send("orders", "write", command_id="c")
    start_worker(handlers)
    until_settled(db)
    assert seen == [1, 1]
    assert notes(db) == ["first", "second"]


def test_an_exception_in_the_block_rolls_back_and_is_the_one_recorded(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def write(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            await done(conn.execute("INSERT INTO ledger VALUES ('x', 'x')"))
            raise LookupError("the handler's own")

    add(handlers, lane, "write", write)
    bus.send("orders", "write", command_id="c", max_attempts=1)
    start_worker(handlers)
    until_settled(db)
    assert notes(db) == []
    (made,) = bus.run(list_attempts("orders", "c"))
    assert (made.error_type, made.error) == ("LookupError", "the handler's own")


async def _close(conn: Any) -> None:
    await done(conn.execute("INSERT INTO ledger VALUES ('abuse', 'lost')"))
    await done(conn.close())


async def _leave_error(conn: Any) -> None:
    with contextlib.suppress(psycopg.Error):
        await done(conn.execute("SELECT 1 / 0"))


async def _leave_transaction(conn: Any) -> None:
    await done(conn.set_autocommit(True))
    await done(conn.execute("BEGIN"))
    await done(conn.execute("INSERT INTO ledger VALUES ('abuse', 'kept')"))


async def _terminate(conn: Any) -> None:
    with contextlib.suppress(psycopg.Error):
        await done(conn.execute("SELECT pg_terminate_backend(pg_backend_pid())"))


async def _change_habits(conn: Any) -> None:
    conn.row_factory = psycopg.rows.dict_row
    await done(conn.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE))
    await done(conn.set_read_only(True))
    await done(conn.execute("SELECT 1"))


async def _leave_cursor(conn: Any) -> None:
    cursor = conn.cursor(name="left_open")
    await done(cursor.execute("SELECT generate_series(1, 1000)"))
    await done(cursor.fetchone())
    await done(cursor.close())


ABUSES = {
    "closed": _close,
    "error": _leave_error,
    "transaction": _leave_transaction,
    "terminated": _terminate,
    "habits": _change_habits,
    "cursor": _leave_cursor,
}


@pytest.mark.parametrize("abuse", ABUSES)
def test_no_abuse_reaches_the_next_user_of_the_pool(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    abuse: str,
) -> None:
    async def misuse(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            await ABUSES[abuse](conn)

    async def fine(command: Any, ctx: Any) -> Any:
        async with either(ctx.connection()) as conn:
            cursor = await done(conn.execute("SELECT 'fine'"))
            return (await done(cursor.fetchone()))[0]

    add(handlers, lane, "misuse", misuse)
    add(handlers, lane, "fine", fine)
    with ConnectionPool(database, kwargs={"autocommit": True}, min_size=1, max_size=1, open=True) as pool:
        worker = start_worker(
            handlers, concurrency=1, pool=pool, retry_policy=RetryPolicy(max_attempts=1, backoff_schedule=[0])
        )
        bus.send("orders", "misuse")
        until_settled(db)
        with pool.connection(timeout=10) as conn:
            assert conn.autocommit
            assert conn.info.transaction_status is TransactionStatus.IDLE
            assert conn.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
            assert conn.execute("SHOW transaction_read_only").fetchone() == ("off",)
        bus.send("orders", "fine", command_id="after")
        until_settled(db)
        found = bus.get_command("orders", "after")
        assert found is not None
        assert found.result == "fine"
        worker.stop()


def test_an_attempt_has_one_connection_at_a_time(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """Otherwise slots that hold one each could wait for each other's."""

    async def greedy(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()):
            with pytest.raises(ConnectionInUseError):
                async with either(ctx.connection()):
                    pass
            with pytest.raises(ConnectionInUseError):
                async with either(ctx.transaction()):
                    pass
        async with either(ctx.connection()) as conn:
            await done(conn.execute("INSERT INTO ledger VALUES ('c', 'after')"))

    add(handlers, lane, "greedy", greedy)
    bus.send("orders", "greedy", command_id="c", max_attempts=1)
    start_worker(handlers, concurrency=1)
    until_settled(db)
    assert verdicts(db, "c") == []
    assert notes(db) == ["after"]


def test_a_connection_that_cannot_be_had_is_a_pool_timeout(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def ask(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()):
            pass

    add(handlers, lane, "ask", ask)
    with ConnectionPool(database, kwargs={"autocommit": True}, min_size=1, max_size=1, open=True) as pool:
        worker = start_worker(handlers, concurrency=1, pool=pool, pool_timeout=0.3)
        with pool.connection():
            bus.send("orders", "ask", command_id="c", max_attempts=1)
            until_settled(db)
        worker.stop()
    (made,) = bus.run(list_attempts("orders", "c"))
    assert made.error_code == "POOL_TIMEOUT"
    assert verdicts(db, "c") == [(1, "EXHAUSTED")]


@pytest.mark.parametrize("kinds", [("sync",), ("async",), ("sync", "async")], ids="+".join)
def test_connections_are_never_more_than_concurrency_and_four(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    kinds: tuple[str, ...],
) -> None:
    most = 0
    inside = 0
    lock = threading.Lock()

    async def hold(command: Any, ctx: Any) -> None:
        nonlocal inside
        async with either(ctx.connection()) as conn:
            await done(conn.execute("SELECT 1"))
            with lock:
                inside += 1
            await opened(go_on)
            with lock:
                inside -= 1

    async def use(command: Any, ctx: Any) -> None:
        async with either(ctx.connection()) as conn:
            await done(conn.execute("INSERT INTO ledger VALUES ('c', 'used')"))
        async with either(ctx.transaction()) as tx:
            await done(tx.execute("SELECT 1"))

    for kind in kinds:
        add(handlers, kind, f"hold_{kind}", hold)
        add(handlers, kind, f"use_{kind}", use)

    def count() -> int:
        nonlocal most
        found = int(
            one(
                db,
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name LIKE 'commandbus %%' AND application_name <> 'commandbus bus' AND %s",
                True,
            )
        )
        most = max(most, found)
        return found

    bus.send_many("orders", [NewCommand(f"hold_{kinds[n % len(kinds)]}") for n in range(6)])
    start_worker(handlers, concurrency=6)
    until(lambda: inside == 6)
    assert count() <= 10
    bus.send_many("orders", [NewCommand(f"use_{kinds[n % len(kinds)]}") for n in range(300)])
    go_on.set()
    until(
        lambda: count() and one(db, "SELECT NOT EXISTS (SELECT FROM commandbus.command WHERE status = 'PENDING')")
    )
    assert most == 10
    assert one(db, "SELECT count(*) FROM ledger") == 300


def test_a_handler_that_asks_for_no_connection_holds_none(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "work", lambda ctx: None)
    bus.send_many("orders", [NewCommand("work") for _ in range(200)])
    start_worker(handlers, concurrency=8)
    until_settled(db)
    assert (
        one(
            db,
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'commandbus handlers'",
        )
        == 0
    )


def test_a_connection_that_died_in_the_pool_costs_no_attempt(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    lane: str,
) -> None:
    monkeypatch.setattr("commandbus.db.pool.CHECK_AFTER_SECONDS", 0.0)  # also if it was used a moment ago

    async def use(command: Any, ctx: Any) -> Any:
        async with either(ctx.connection()) as conn:
            cursor = await done(conn.execute("SELECT pg_backend_pid()"))
            return (await done(cursor.fetchone()))[0]

    add(handlers, lane, "use", use)
    start_worker(handlers, concurrency=2)
    bus.send("orders", "use", command_id="before")
    until_settled(db)
    before = bus.get_command("orders", "before")
    assert before is not None
    assert one(db, "SELECT pg_terminate_backend(%s, 5000)", before.result)
    bus.send("orders", "use", command_id="after")
    until_settled(db)
    after = bus.get_command("orders", "after")
    assert after is not None
    assert (after.status, after.attempts) == (CommandStatus.COMPLETED, 1)


def test_an_async_handler_takes_an_idle_connection_without_a_thread(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    def first(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            conn.execute("INSERT INTO ledger VALUES (%s, 'sync')", (command.command_id,))

    async def later(command: Any, ctx: Any) -> None:
        async with ctx.transaction() as tx:
            await tx.execute("INSERT INTO ledger VALUES (%s, 'async')", (command.command_id,))

    handlers.register("orders", "first", first)
    handlers.register("orders", "later", later)
    worker = start_worker(handlers, concurrency=1)
    bus.send("orders", "first")
    until_settled(db)
    bus.send_many("orders", [NewCommand("later") for _ in range(20)])
    until_settled(db)
    assert notes(db) == ["async"] * 20 + ["sync"]
    askers = [
        thread.name for thread in threading.enumerate() if worker.id in thread.name and "asker" in thread.name
    ]
    assert askers == []
