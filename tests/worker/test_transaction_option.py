"""Handlers with transaction=True: one transaction, begun by its first statement, committed with the completion."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    Command,
    CommandBus,
    CommandRecord,
    CommandStatus,
    HandlerRegistry,
    NewCommand,
    TransactionUsedError,
    Worker,
    handler,
)
from commandbus.flow.commands.claim import claim
from commandbus.worker.execution.connections import HandlerConnections
from support.waiting import one, until, until_settled, verdicts
from support.workers import AT_ONCE, _in_one_go, done, either, opened

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
Body = Callable[[Any, Any, Any], Awaitable[Any]]
INSERT = "INSERT INTO ledger VALUES (%s, %s)"


@pytest.fixture(autouse=True)
def ledger(db: Db) -> None:
    """A table of the application's own."""
    db.execute("CREATE TABLE ledger (command_id text, attempt integer)")


def add(handlers: HandlerRegistry, lane: str, name: str, body: Body, **options: Any) -> None:
    """Register one body for the sync or the async lane."""
    options = {"transaction": True} | options
    if lane == "async":

        async def handle(command: Any, ctx: Any, tx: Any) -> Any:
            return await body(command, ctx, tx)

        handlers.register("orders", name, handle, **options)
    else:
        handlers.register("orders", name, lambda command, ctx, tx: _in_one_go(body(command, ctx, tx)), **options)


def rows(db: Db) -> list[tuple[str, int]]:
    return [(name, number) for name, number in db.execute("SELECT * FROM ledger ORDER BY 1, 2")]


def record(bus: CommandBus, command_id: str) -> CommandRecord:
    found = bus.get_command("orders", command_id)
    assert found is not None
    return found


STATUS = "SELECT status::text FROM commandbus.command WHERE command_id = 'c'"
IN_TRANSACTION = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in trans%%'"
)


def test_writes_result_and_completion_are_one_commit(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[Any] = []

    async def work(command: Any, ctx: Any, tx: Any) -> Any:
        seen.append(one(db, IN_TRANSACTION))
        await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
        async with either(tx.cursor()) as cursor:
            await done(cursor.execute("SELECT count(*) FROM ledger"))
            count = (await done(cursor.fetchone()))[0]
        seen.append((rows(db), one(db, IN_TRANSACTION), one(db, STATUS)))
        return {"rows": count, "text": "ü"}

    add(handlers, lane, "work", work)
    bus.create_queue("answers")
    bus.send("orders", "work", command_id="c", reply_to="answers")
    worker = start_worker(handlers)
    until_settled(db)
    assert seen == [0, ([], 1, "PENDING")], "nothing was idle in a transaction before its first use"
    assert rows(db) == [("c", 1)]
    found = record(bus, "c")
    assert (found.status, found.result, found.attempts) == (CommandStatus.COMPLETED, {"rows": 1, "text": "ü"}, 1)
    assert one(db, "SELECT message -> 'result' FROM pgmq.q_answers") == {"rows": 1, "text": "ü"}
    assert verdicts(db, "c") == []
    assert worker.stop().settled == 1


def test_one_that_uses_no_tx_completes_in_the_ordinary_way(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(command: Any, ctx: Any, tx: Any) -> Any:
        return command.data

    monkeypatch.setattr(HandlerConnections, "_pool", None)  # nobody may ask for a connection

    add(handlers, lane, "work", work)
    bus.send("orders", "work", {"n": 1}, command_id="c")
    bus.send("orders", "work", command_id="none")
    worker = start_worker(handlers)
    until_settled(db)
    assert (record(bus, "c").result, record(bus, "none").result) == ({"n": 1}, None)
    assert worker.stop().settled == 2


def test_a_raise_rolls_back_and_is_retried(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any, tx: Any) -> str:
        await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
        if ctx.attempt < 3:
            raise RuntimeError("not yet")
        return "in the end"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    assert rows(db) == [("c", 3)]
    assert verdicts(db, "c") == [(1, "RETRY"), (2, "RETRY")]
    trace = bus.get_attempts("orders", "c")[0].traceback or ""
    assert "not yet" in trace
    assert "lazy_transaction.py" not in trace
    assert "adapters.py" not in trace


def test_a_database_error_that_is_swallowed_is_an_error_and_loses_no_write(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any, tx: Any) -> str:
        await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
        if ctx.attempt == 1:
            with contextlib.suppress(psycopg.Error):
                await done(tx.execute("SELECT 1 / 0"))
            return "as if nothing had happened"
        with contextlib.suppress(psycopg.Error):
            async with either(tx.savepoint()):
                await done(tx.execute("SELECT 1 / 0"))
        return "with a savepoint"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    assert (rows(db), record(bus, "c").result) == ([("c", 2)], "with a savepoint")
    (first,) = bus.get_attempts("orders", "c")
    assert (first.verdict, first.error_code) == ("RETRY", "TRANSACTION_ABORTED")
    assert "savepoint" in (first.error or "")


@pytest.mark.parametrize(
    ("misuse", "code", "advice"),
    [
        ("transaction", "TRANSACTION_USED", "use the parameter tx instead of ctx.transaction()"),
        ("complete", "TRANSACTION_USED", "returns its result"),
        ("commit", "TRANSACTION_ENDED", "commit()"),
        ("result", "INVALID_RESULT", "result"),
    ],
)
def test_misuse_commits_nothing_and_is_not_retried(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    misuse: str,
    code: str,
    advice: str,
) -> None:
    async def work(command: Any, ctx: Any, tx: Any) -> Any:
        await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
        match misuse:
            case "transaction":
                ctx.transaction()
            case "complete":
                tx.complete("x")
            case "commit":
                await done(tx.commit())
        return object()

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    found = record(bus, "c")
    assert (rows(db), found.status) == ([], CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    assert (found.error_code, advice in (found.error or "")) == (code, True), found.error


def test_what_is_sent_in_it_is_part_of_it(
    bus: CommandBus, database: str, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any, tx: Any) -> None:
        if lane == "sync":
            bus.send("orders", "next", command_id=f"n{ctx.attempt}", conn=tx)
        else:
            async with AsyncCommandBus(database) as sender:
                await sender.send("orders", "next", command_id=f"n{ctx.attempt}", conn=tx)
        if ctx.attempt == 1:
            raise RuntimeError("take it back")

    add(handlers, lane, "work", work)
    handlers.register("orders", "next", lambda ctx: None)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    assert bus.get_command("orders", "n1") is None
    assert record(bus, "n2").status is CommandStatus.COMPLETED


def test_without_its_fence_nothing_of_it_is_committed(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    started = threading.Event()

    async def work(command: Any, ctx: Any, tx: Any) -> None:
        await done(tx.execute(INSERT, (command.command_id, ctx.attempt)))
        started.set()
        await opened(go_on)

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    worker = start_worker(handlers)
    assert started.wait(60)
    with db.transaction():  # or the worker itself would be faster
        db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s'")
        bus.run(claim(domain="orders", worker="thief", n=1, lease_seconds=60, cursor=None), db)
    go_on.set()
    worker.stop()
    assert rows(db) == []
    assert one(db, "SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands") == "thief"


def test_other_forms(bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker) -> None:
    """(ctx, tx); a method; an isolation level; a `def` that returns an awaitable; a fresh thread."""

    @handlers.handler("orders", "short", transaction="serializable", timeout=30)
    def short(ctx: Any, tx: Any) -> Any:
        tx.execute(INSERT, ("short", 1))
        return tx.execute("SHOW transaction_isolation").fetchone()[0]

    class Methods:
        @handler("orders", "method", transaction=True, fresh_thread=True)
        def method(self, command: Command, ctx: Any, tx: Any) -> str:
            tx.execute(INSERT, ("method", 1))
            return threading.current_thread().name

    async def later(command: Any, ctx: Any, tx: Any) -> str:
        await tx.execute(INSERT, ("returned", 1))
        return "awaited"

    def both(command: Any, ctx: Any, tx: Any) -> Any:
        tx.execute(INSERT, ("both", 1))
        return later(command, ctx, tx)

    handlers.register_instance(Methods())
    handlers.register("orders", "returned", lambda command, ctx, tx: later(command, ctx, tx), transaction=True)
    handlers.register("orders", "both", both, transaction=True)
    bus.send_many("orders", [NewCommand(n, command_id=n) for n in ("short", "method", "returned", "both")])
    start_worker(handlers)
    until_settled(db)
    assert rows(db) == [("method", 1), ("returned", 1), ("short", 1)]
    assert record(bus, "short").result == "serializable"
    assert record(bus, "returned").result == "awaited"
    assert "make the handler `async def`" in (record(bus, "both").error or "")


def test_a_tx_outlives_no_handler(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    kept: list[Any] = []

    async def work(command: Any, ctx: Any, tx: Any) -> None:
        if command.data:
            await done(tx.execute("SELECT 1"))
        kept.append(tx)

    add(handlers, lane, "work", work)
    bus.send("orders", "work", True)
    bus.send("orders", "work", False)
    worker = start_worker(handlers)
    until_settled(db)
    worker.stop()
    for tx in kept:
        use = tx.execute if lane == "sync" else lambda text, tx=tx: tx.execute(text).send(None)
        with pytest.raises(TransactionUsedError, match="after the handler had ended"):
            use("SELECT 1")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda command, ctx: None, "has transaction=True, so it must take (command, ctx, tx) or (ctx, tx)"),
        (lambda ctx: None, "must take (command, ctx, tx) or (ctx, tx), not (ctx)"),
        (lambda command, ctx, tx, more: None, "nobody gives it more"),
    ],
)
def test_its_parameters_are_checked(function: Any, said: str) -> None:
    with pytest.raises(TypeError) as refused:
        HandlerRegistry().register("orders", "x", function, transaction=True)
    assert said in str(refused.value)


def test_bad_options_name_their_value() -> None:
    with pytest.raises(ValueError, match=r"must be True, False, or an isolation level .* not 'yes'"):
        HandlerRegistry().register("orders", "x", lambda command, ctx, tx: None, transaction="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="transaction=True gives it a transaction"):
        HandlerRegistry().register("orders", "x", lambda command, ctx, tx: None)
    with pytest.raises(TypeError, match="a handler has no option 'retries'"):
        HandlerRegistry().register("orders", "x", lambda ctx: None, retries=3)  # type: ignore[call-arg]


def test_a_second_block_is_an_error_that_the_author_sees(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Inside another one, nothing is committed. After one that has completed the command, the log says it."""

    @handlers.handler("orders", "inside")
    def inside(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(INSERT, ("inside", 1))
            with ctx.transaction():
                pass

    @handlers.handler("orders", "after")
    def after(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(INSERT, ("after", 1))
        ctx.transaction()

    @handlers.handler("orders", "value")
    def value(command: Any, ctx: Any) -> str:
        with ctx.transaction() as tx:
            tx.complete("by tx")
        return "returned"

    names = ("inside", "after", "value")
    bus.send_many("orders", [NewCommand(name, command_id=name) for name in names])
    with caplog.at_level(logging.WARNING, "commandbus.worker"):
        start_worker(handlers, retry_policy=AT_ONCE)
        until(lambda: {name for name in names if verdicts(db, name)} == set(names))
    assert rows(db) == [("after", 1)]
    assert record(bus, "inside").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
    assert "use the tx of the outer block" in (record(bus, "inside").error or "")
    codes = {name: bus.get_attempts("orders", name)[0].error_code for name in names}
    assert codes == {"inside": "TRANSACTION_USED", "after": "TRANSACTION_USED", "value": "RETURNED_TOO_LATE"}
    said = {record.levelname + " " + record.getMessage() for record in caplog.records}
    assert any(line.startswith("ERROR after after") and "write everything in one block" in line for line in said)
    assert any(line.startswith("ERROR value value") and "the value was not stored" in line for line in said)
