"""Leases: renewed while a handler runs, fenced when lost, extended on request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AttemptCanceledError,
    AttemptFencedError,
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    Worker,
)
from commandbus.flow.commands.claim import Room, claim, put_right, run_alone
from support.waiting import one, until, until_settled, verdicts, within
from support.workers import add, done, either, opened, quick_settings, short_lease

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def steal(bus: CommandBus, db: Db, thief: str = "thief") -> None:
    """As if the lease had run out and another worker had claimed the command."""
    with db.transaction():  # or the worker itself would be faster
        db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s'")
        found = bus.run(claim(domain="orders", worker=thief, n=10, lease_seconds=60, cursor=None), db)
    assert len(found.odd) == 1


def holder(db: Db) -> str:
    return str(one(db, "SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands"))


def until_tried(db: Db) -> None:
    """Until the lease keeper has tried twice to write to a row: the second time it had heard that it could not."""
    query = """SELECT query_start FROM pg_stat_activity WHERE datname = current_database()
                  AND application_name LIKE '% lease keeper' AND query LIKE '%renewed AS%'"""
    seen = set(db.execute(query.encode()).fetchall())
    most = len(seen) + 2
    until(lambda: seen.update(db.execute(query.encode()).fetchall()) or len(seen) >= most, what=lambda: seen)


@pytest.mark.slow
def test_a_handler_that_outlasts_its_lease_is_not_run_twice(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    runs: list[str] = []

    async def long(command: Any, ctx: Any) -> str:
        runs.append(command.command_id)
        await opened(go_on)
        return "done"

    add(handlers, "sync", "sync", long)
    add(handlers, "async", "async", long)
    for _ in range(2):
        start_worker(handlers, concurrency=2, **short_lease())
    bus.send("orders", "sync", command_id="s")
    bus.send("orders", "async", command_id="a")
    until(lambda: len(runs) == 2)
    first_end = one(db, "SELECT max(vt) FROM pgmq.q_orders__commands")
    until(lambda: one(db, "SELECT now() > %s + interval '2 s'", first_end))
    assert sorted(runs) == ["a", "s"]
    go_on.set()
    until_settled(db)
    assert sorted(runs) == ["a", "s"]
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0
    assert one(db, "SELECT array_agg(attempt) FROM commandbus.command") == [1, 1]


def test_a_lost_lease_is_noticed_and_nothing_of_the_attempt_lands(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    started = threading.Event()

    async def work(command: Any, ctx: Any) -> str:
        started.set()
        await opened(go_on)
        return "too late"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    with caplog.at_level(logging.WARNING, "commandbus.worker"):
        worker = start_worker(handlers, **short_lease())
        assert started.wait(60)
        steal(bus, db)
        until(lambda: any("was lost" in each.getMessage() for each in caplog.records))
        go_on.set()
        until(lambda: any("was refused" in each.getMessage() for each in caplog.records))
        assert worker.stop().is_clean
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.status, found.result, found.worker) == (CommandStatus.IN_PROGRESS, None, "thief")
    assert holder(db) == "thief"


def test_a_failure_after_a_lost_lease_does_not_land_either(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "work")
    def work(ctx: Any) -> None:
        started.set()
        go_on.wait(20)
        raise RuntimeError("too late")

    bus.send("orders", "work", command_id="c")
    worker = start_worker(handlers)
    assert started.wait(60)
    steal(bus, db)
    go_on.set()
    worker.stop()
    assert holder(db) == "thief"
    assert verdicts(db, "c") == []
    assert one(db, "SELECT status::text FROM commandbus.command") == "PENDING"


def test_extend_moves_the_deadline_and_the_lease_stays_one_renewal_long(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    """So that the command of a worker that dies in a long extension returns soon."""
    extended = threading.Event()
    left: list[float] = []

    async def work(command: Any, ctx: Any) -> None:
        await done(ctx.extend(600))
        await done(ctx.extend("2m"))  # never shortens
        left.append(ctx.remaining())
        extended.set()
        await opened(go_on)

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, visibility_timeout=20, statement_timeout=5)
    assert extended.wait(60)
    assert 590 < left[0] <= 600
    assert one(
        db, "SELECT vt BETWEEN now() + interval '15 s' AND now() + interval '20 s' FROM pgmq.q_orders__commands"
    )
    go_on.set()
    until_settled(db)


def test_extend_waits_while_another_transaction_holds_the_queue_row(
    bus: CommandBus,
    db: Db,
    database: str,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    started, returned = threading.Event(), threading.Event()

    async def work(command: Any, ctx: Any) -> str:
        started.set()
        await opened(go_on)
        await done(ctx.extend(60))
        returned.set()
        return "extended"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, visibility_timeout=15, statement_timeout=5)
    assert started.wait(60)
    before = one(db, "SELECT vt FROM pgmq.q_orders__commands")
    with psycopg.connect(database) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        go_on.set()
        until_tried(db)
        assert not returned.is_set()
        assert one(db, "SELECT vt FROM pgmq.q_orders__commands") == before
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.result, found.attempts) == ("extended", 1)


@pytest.mark.slow
def test_extend_says_so_when_the_lease_cannot_be_renewed(
    bus: CommandBus,
    db: Db,
    database: str,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    """Before its lease ends the attempt is asked to stop; it does not go on as if it had been extended."""
    started = threading.Event()
    raised: list[BaseException] = []

    async def work(command: Any, ctx: Any) -> str:
        if command.command_id == "c" and not raised:
            started.set()
            await opened(go_on)
            try:
                await done(ctx.extend(60))
            except BaseException as error:
                raised.append(error)
                raise
        return "done"

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, **short_lease())
    assert started.wait(60)
    with psycopg.connect(database) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        go_on.set()
        until(lambda: raised)
    until_settled(db)
    assert isinstance(raised[0], AttemptCanceledError | asyncio.CancelledError)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert found.result == "done"
    (first,) = bus.get_attempts("orders", "c")
    assert (first.verdict, first.rung) == ("WAIVED", "lease")
    assert "another transaction holds its queue row" in (first.error or "")


@pytest.mark.slow
def test_a_command_whose_queue_row_is_locked_for_long_does_not_run_twice_at_once(
    bus: CommandBus, db: Db, database: str, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """While the row is locked nobody can claim it. Then the lease must not be older than its worker thinks."""
    running: list[str] = []
    most: list[int] = []

    async def work(command: Any, ctx: Any) -> None:
        running.append(command.command_id)
        most.append(len(running))
        try:
            for _ in range(300):
                ctx.raise_if_canceled()
                await done(ctx.sleep(0.01))
        finally:
            running.pop()

    add(handlers, lane, "work", work)
    for _ in range(2):
        start_worker(handlers, **short_lease(), task_timeout=30)
    bus.send("orders", "work", command_id="c")
    until(lambda: running)
    with psycopg.connect(database) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        lease_end = one(db, "SELECT vt FROM pgmq.q_orders__commands")
        until(lambda: one(db, "SELECT now() > %s + interval '0.2 s'", lease_end))
    until_settled(db, 30)
    assert max(most) == 1


def test_a_locked_queue_row_is_renewed_soon_after_it_is_free(
    bus: CommandBus,
    db: Db,
    database: str,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "work")
    def work(ctx: Any) -> None:
        started.set()
        go_on.wait(20)

    bus.send("orders", "work", command_id="c")
    start_worker(handlers, visibility_timeout=6, statement_timeout=3, cancel_grace=0.5)
    assert started.wait(60)
    first = one(db, "SELECT vt FROM pgmq.q_orders__commands")
    with psycopg.connect(database) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        until(lambda: one(db, "SELECT now() > %s - interval '3 s'", first))  # a renewal was due after 2 s
        assert one(db, "SELECT vt FROM pgmq.q_orders__commands") == first
    within(1.0, lambda: one(db, "SELECT vt FROM pgmq.q_orders__commands") > first)
    go_on.set()
    until_settled(db)
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0


def test_progress_that_could_not_be_stored_is_stored_later(
    bus: CommandBus,
    db: Db,
    database: str,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
) -> None:
    told = threading.Event()
    go = threading.Event()

    @handlers.handler("orders", "work")
    def work(ctx: Any) -> None:
        told.set()
        go.wait(10)
        ctx.heartbeat({"page": 7})
        go_on.wait(20)

    bus.send("orders", "work", command_id="c")
    start_worker(handlers)
    assert told.wait(60)
    with psycopg.connect(database) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        go.set()
        until_tried(db)
    until(lambda: getattr(bus.get_command("orders", "c"), "progress", None) == {"page": 7}, 3)
    go_on.set()
    until_settled(db)


@pytest.mark.parametrize("bad", [-1, "soon", float("nan"), None])
def test_extend_refuses_what_is_no_duration(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, bad: Any
) -> None:
    raised: list[BaseException] = []

    @handlers.handler("orders", "work")
    def work(ctx: Any) -> None:
        try:
            ctx.extend(bad)
        except Exception as error:
            raised.append(error)

    bus.send("orders", "work")
    start_worker(handlers)
    until_settled(db)
    assert isinstance(raised[0], ValueError | TypeError)
    assert "seconds" in str(raised[0])


def test_extend_says_when_the_command_is_lost(
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
        started.set()
        await opened(go_on)
        try:
            await done(ctx.extend(60))
        except AttemptFencedError as error:
            raised.append(error)
            raise

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers)
    assert started.wait(60)
    steal(bus, db)
    go_on.set()
    until(lambda: raised)
    assert "'c'" in str(raised[0])
    assert holder(db) == "thief"


def test_extend_needs_no_second_connection(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    """A handler that holds its connection and extends must not wait for a second one: there may be none."""

    async def work(command: Any, ctx: Any) -> str:
        async with either(ctx.connection()) as conn:
            await done(conn.execute("SELECT 1"))
            await done(ctx.extend(60))
        async with either(ctx.transaction()) as tx:
            await done(tx.execute("SELECT 1"))
            await done(ctx.extend(60))
            tx.complete("extended")
        return ""

    add(handlers, lane, "work", work)
    bus.send("orders", "work", command_id="c")
    start_worker(handlers, concurrency=1, pool_timeout=2.0)
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.result, found.attempts) == ("extended", 1)


def test_a_cancelled_extension_does_not_end_the_renewals(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "work")
    async def work(ctx: Any) -> str:
        for _ in range(20):
            asking = asyncio.ensure_future(ctx.extend(60))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await ctx.extend(120)
        return "extended"

    bus.send("orders", "work", command_id="c")
    start_worker(handlers, **short_lease())
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.result, found.attempts) == ("extended", 1)


def test_lost_commands_run_one_at_a_time_and_until_idle_waits_for_them(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, database: str
) -> None:
    """A script without a supervisor, whose registry no other process can import: they run one after the other."""
    running: list[str] = []
    together: list[int] = []

    def work(command: Any, ctx: Any) -> int:
        running.append(command.command_id)
        together.append(len(running))
        ctx.sleep(0.05)
        running.remove(command.command_id)
        return len(together)

    handlers.register("orders", "work", work)
    for n in range(4):
        bus.send("orders", "work", command_id=f"c{n}", max_attempts=1)
    bus.run(claim(domain="orders", worker="dead", n=10, lease_seconds=60, cursor=None))
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s'")
    Worker(handlers, settings=quick_settings(database, concurrency=4)).run(until_idle=True)
    assert together == [1, 1, 1, 1]
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 4
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict NOT IN ('LOST', 'GIVEN_BACK')") == 0


def test_a_second_loss_is_charged_where_there_is_no_process_of_its_own(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, database: str
) -> None:
    """No other process can import this registry. What ends its whole container must not do so for ever."""
    started: list[str] = []
    handlers.register("orders", "work", lambda command, ctx: started.append(command.command_id))
    bus.send("orders", "work", command_id="killer", max_attempts=1)
    for worker in ("dead", "dead too"):
        found = bus.run(claim(domain="orders", worker=worker, n=10, lease_seconds=60, cursor=None))
        if found.odd:  # as its claimer does before it starts one that was lost
            room = Room(alone=1)
            right, _ = bus.run(put_right(domain="orders", worker=worker, odd=found.odd, max_bytes=1000, room=room))
            assert [row.command_id for row in right] == ["killer"]
            assert bus.run(run_alone("orders", worker, right[0]))
        db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s'")
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    assert started == []
    found_again = bus.get_command("orders", "killer")
    assert found_again is not None
    assert found_again.status == "IN_TROUBLESHOOTING_QUEUE"
    assert verdicts(db, "killer") == [(1, "LOST"), (2, "LOST"), (3, "EXHAUSTED")]
