"""The network between a worker and its server: cut, silent, or losing the one answer that matters."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    Limit,
    NewCommand,
    RetryPolicy,
    Worker,
)
from support.network import Proxy
from support.waiting import Stopwatch, one, statuses, until, until_settled, verdicts
from support.workers import add, done, either, opened, quick_settings, short_lease

pytestmark = pytest.mark.waits
StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
PATIENT = RetryPolicy(max_attempts=30, backoff_schedule=[0.05], jitter=0)
INSERT = "INSERT INTO ledger (kind, command_id, attempt) VALUES ('exact', %s, %s)"


def ledger(db: Db) -> list[tuple[str, int]]:
    return [(name, number) for name, number in db.execute("SELECT command_id, attempt FROM ledger ORDER BY 1, 2")]


@pytest.fixture
def handlers() -> HandlerRegistry:
    """`exact` and `exact_async` write the ledger in the completing transaction."""
    handlers = HandlerRegistry()

    async def exact(command: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            await done(tx.execute(INSERT, (command.command_id, ctx.attempt_number)))
            tx.complete("kept")

    add(handlers, "sync", "exact", exact, retry_policy=PATIENT)
    add(handlers, "async", "exact_async", exact, retry_policy=PATIENT)
    return handlers


@pytest.fixture(params=["exact", "exact_async"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which handler."""
    return str(request.param)


def test_a_pool_is_back_soon_after_its_database(bus: CommandBus, proxy: Proxy, through: str) -> None:
    """However long the database was away: psycopg's pools pause for ever longer between two attempts."""
    settings = quick_settings(through, pool_timeout=60.0)
    sent = threading.Event()
    with CommandBus(settings=settings) as away:
        proxy.is_refusing = True

        def send() -> None:
            away.send("orders", "exact", command_id="c")
            sent.set()

        thread = threading.Thread(target=send)
        thread.start()
        until(lambda: proxy.refused >= 5, 30)  # pauses of 1, 2, 4 and 8 s would have passed, and one of 16 be next
        proxy.is_refusing = False
        assert sent.wait(5)
        thread.join()
    assert bus.get_command("orders", "c") is not None


def test_an_async_pool_is_back_soon_after_its_database(bus: CommandBus, proxy: Proxy, through: str) -> None:
    async def send() -> None:
        async with AsyncCommandBus(settings=quick_settings(through, pool_timeout=60.0)) as away:
            proxy.is_refusing = True
            sending = asyncio.create_task(away.send("orders", "exact", command_id="c"))
            await asyncio.to_thread(until, lambda: proxy.refused >= 5, 30)
            proxy.is_refusing = False
            await asyncio.wait_for(sending, 5)

    asyncio.run(send())
    assert bus.get_command("orders", "c") is not None


# --- cut and silent -------------------------------------------------------------------------------------------


def test_a_cut_network_loses_nothing(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, proxy: Proxy, through: str
) -> None:
    bus.send_many(
        "orders",
        [NewCommand("exact" if n % 2 else "exact_async", command_id=f"c{n:03}") for n in range(600)],
    )
    worker = start_worker(handlers, through, visibility_timeout=3.0, statement_timeout=1.0)
    for reached in (50, 150, 250, 350):
        until(lambda reached=reached: len(ledger(db)) >= reached)
        proxy.cut()
    until_settled(db, 40)
    assert statuses(db) == {"COMPLETED": 600}
    assert [name for name, _ in ledger(db)] == [f"c{n:03}" for n in range(600)]
    assert worker.stop().is_clean


def test_a_worker_that_fell_silent_is_replaced_and_its_late_writes_are_refused(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    proxy: Proxy,
    through: str,
    kind: str,
) -> None:
    """It hears nothing for longer than its leases last; another worker finishes; then it hears again.

    Cut off, it gives its attempts up by its own clock. Whatever they do later, nothing of it lands.
    """
    go_on = threading.Event()
    written: list[str] = []
    fenced: list[BaseException] = []
    slow = HandlerRegistry()

    async def wait(command: Any, ctx: Any) -> None:
        try:
            async with either(ctx.transaction()) as tx:
                await done(tx.execute(INSERT, (command.command_id, ctx.attempt_number)))
                written.append(command.command_id)
                await opened(go_on)
        except BaseException as error:
            fenced.append(error)
            raise

    add(slow, "async" if kind == "exact_async" else "sync", kind, wait)
    ids = [f"c{n}" for n in range(4)]
    bus.send_many("orders", [NewCommand(kind, command_id=each) for each in ids])
    silent = start_worker(slow, through, concurrency=4, **short_lease())
    until(lambda: sorted(written) == ids)
    proxy.hearing.clear()
    start_worker(handlers, database, **short_lease())
    until_settled(db)
    finished = ledger(db)
    assert [each for each, _ in finished] == ids, "one after the other: nobody knows why they were lost"
    proxy.hearing.set()
    go_on.set()
    until(lambda: len(fenced) == 4)
    report = silent.stop()
    assert (report.is_clean, report.abandoned) == (True, 0)
    assert ledger(db) == finished
    assert statuses(db) == {"COMPLETED": 4}
    for each, attempt in finished:
        given_back = [(number, "GIVEN_BACK") for number in range(2, attempt)]
        assert verdicts(db, each) == [(1, "LOST"), *given_back]


# --- the answer that was lost ---------------------------------------------------------------------------------


def test_a_commit_whose_answer_was_lost_has_happened_once(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    proxy: Proxy,
    through: str,
    kind: str,
) -> None:
    worker = start_worker(handlers, through, concurrency=1)
    proxy.swallow(b"COMMIT")
    bus.send("orders", kind, command_id="c")
    assert proxy.swallowed.wait(60)
    until_settled(db)
    assert ledger(db) == [("c", 1)]
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.status, found.result, found.attempts) == (CommandStatus.COMPLETED, "kept", 1)
    report = worker.stop()
    assert (report.is_clean, report.settled) == (True, 1)
    assert verdicts(db, "c") == []


def test_a_commit_that_never_arrived_is_tried_again(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    proxy: Proxy,
    through: str,
    kind: str,
) -> None:
    worker = start_worker(handlers, through, concurrency=1)
    proxy.swallow(b"COMMIT", forward=False)
    bus.send("orders", kind, command_id="c")
    assert proxy.swallowed.wait(60)
    until_settled(db)
    assert ledger(db) == [("c", 2)]
    assert verdicts(db, "c") == [(1, "RETRY")]
    assert one(db, "SELECT error_code FROM commandbus.attempt") == "COMMIT_LOST"
    assert worker.stop().is_clean


@pytest.mark.parametrize("arrives", [True, False], ids=["committed", "lost"])
def test_a_commit_in_doubt_that_nobody_can_be_asked_about_is_decided_by_the_fence(
    bus: CommandBus,
    db: Db,
    start_worker: StartWorker,
    proxy: Proxy,
    through: str,
    kind: str,
    arrives: bool,
) -> None:
    """The handler fails; its failure is refused if the commit had happened, and else it is tried again."""
    handlers = HandlerRegistry()
    raised: list[BaseException] = []

    async def exact(command: Any, ctx: Any) -> None:
        try:
            async with either(ctx.transaction()) as tx:
                await done(tx.execute(INSERT, (command.command_id, ctx.attempt_number)))
                tx.complete("kept")
        except BaseException as error:
            raised.append(error)
            raise

    add(handlers, "async" if kind == "exact_async" else "sync", kind, exact, retry_policy=PATIENT)
    worker = start_worker(handlers, through, concurrency=1, pool_timeout=0.3)
    proxy.swallow(b"COMMIT", forward=arrives, then_refuse=True)
    bus.send("orders", kind, command_id="c")
    until(lambda: raised)
    proxy.is_refusing = False
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.status, found.result) == (CommandStatus.COMPLETED, "kept")
    assert ledger(db) == [("c", found.attempts)]  # the pool may need more than one attempt to come back
    assert found.attempts == (len(raised) if arrives else len(raised) + 1)
    assert worker.stop().is_clean
    assert {verdict for _, verdict in verdicts(db, "c")} == (set() if arrives else {"RETRY"})


def test_a_settlement_in_the_block_whose_answer_was_lost_is_tried_again(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    proxy: Proxy,
    through: str,
    kind: str,
) -> None:
    """The connection breaks after the settling statement and before COMMIT: nothing of it has happened."""
    start_worker(handlers, through, concurrency=1)
    # Either statement has it: an attempt that had to wait for its connection is settled by a longer one.
    proxy.swallow(b"finished_at = ")
    bus.send("orders", kind, command_id="c")
    assert proxy.swallowed.wait(60)
    until_settled(db)
    assert ledger(db) == [("c", 2)]
    assert verdicts(db, "c") == [(1, "RETRY")]


@pytest.mark.parametrize("arrives", [True, False], ids=["answer", "statement"])
def test_a_settle_that_was_cut_is_repeated_and_the_handler_is_not(
    bus: CommandBus, db: Db, start_worker: StartWorker, proxy: Proxy, through: str, arrives: bool
) -> None:
    runs: list[str] = []
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda ctx: runs.append(ctx.command.command_id))
    worker = start_worker(handlers, through)
    proxy.swallow(b"finished_at = ", forward=arrives)
    bus.send("orders", "work", command_id="c")
    assert proxy.swallowed.wait(60)
    until_settled(db)
    report = worker.stop()
    assert (report.is_clean, report.settled) == (True, 1)
    assert runs == ["c"]
    assert verdicts(db, "c") == []


def test_a_permit_whose_answer_was_lost_is_given_back(
    bus: CommandBus, db: Db, proxy: Proxy, through: str, start_worker: StartWorker
) -> None:
    """Else nobody could use it until its lease ends."""
    bus.declare_limit(Limit("api", concurrency=1, lease=120))
    handlers = HandlerRegistry()
    handlers.register("orders", "call", lambda ctx: "called", limits=["api"])
    proxy.swallow(b"holders = l.holders ||")
    bus.send("orders", "call", command_id="c")
    worker = start_worker(handlers, through)
    assert proxy.swallowed.wait(60)
    until_settled(db, 15)
    assert statuses(db) == {"COMPLETED": 1}
    until(lambda: one(db, "SELECT holders = '{}' FROM commandbus.limits"))
    assert worker.stop().is_clean


def test_what_a_claim_took_whose_answer_was_lost_is_given_back_at_once(
    bus: CommandBus, db: Db, start_worker: StartWorker, proxy: Proxy, through: str
) -> None:
    """A command and a raw message, with a lease of a minute."""
    runs: dict[str, int] = {}
    handlers = HandlerRegistry()

    @handlers.handler("orders", "work")
    def work(command: Any, ctx: Any) -> None:
        runs[command.command_id] = ctx.attempt_number

    bus.send("orders", "work", command_id="c")
    raw = '{"command_type": "work", "command_id": "raw"}'
    db.execute("SELECT pgmq.send('orders__commands', %s::jsonb)", (raw,))
    proxy.swallow(b"vt = pg_catalog.now() + pg_catalog.make_interval(secs")  # the claim of normal priority
    worker = start_worker(handlers, through, visibility_timeout=60.0)
    assert proxy.swallowed.wait(60)
    until(lambda: set(runs) == {"c", "raw"})
    until_settled(db)
    assert verdicts(db, "c") == [(1, "GIVEN_BACK")]
    said = "given back before it had started: the answer to its claim was lost"
    assert one(db, "SELECT error FROM commandbus.attempt") == said
    assert runs == {"c": 2, "raw": 1}
    assert worker.stop().is_clean


# --- no server ------------------------------------------------------------------------------------------------


def test_outcomes_that_could_not_be_written_are_reported(
    bus: CommandBus, db: Db, start_worker: StartWorker, proxy: Proxy, through: str
) -> None:
    started, go_on = threading.Event(), threading.Event()
    handlers = HandlerRegistry()

    async def work(command: Any, ctx: Any) -> None:
        started.set()
        await opened(go_on)

    add(handlers, "sync", "work", work)
    bus.send("orders", "work", command_id="c")
    worker = start_worker(handlers, through)
    assert started.wait(60)
    proxy.is_refusing = True
    proxy.cut()
    go_on.set()
    stopwatch = Stopwatch()
    report = worker.stop(wait=2)
    assert stopwatch.seconds(waits=2.0) < 3
    assert (report.abandoned, report.unwritten, report.is_clean) == (0, 1, False)
    assert bus.get_command("orders", "c").status is CommandStatus.IN_PROGRESS  # type: ignore[union-attr]


def test_a_server_that_is_down_at_the_start_is_a_clear_error_at_once_where_nobody_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda ctx: None)
    url = f"postgresql://postgres:secret@127.0.0.1:{port}/none"
    worker = Worker(handlers, settings=quick_settings(url, wait_for_database=False))
    stopwatch = Stopwatch()
    with pytest.raises(psycopg.OperationalError, match=str(port)) as caught:
        worker.run()
    assert stopwatch.seconds() < 2
    assert "secret" not in str(caught.value)
    assert not worker.is_running
