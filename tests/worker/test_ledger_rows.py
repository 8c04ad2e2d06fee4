"""The ledger of a command beside a running worker: each wait is written down where it ends, and nowhere else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    HandlerRegistry,
    Ledger,
    PermanentCommandError,
    RetryPolicy,
    TransientCommandError,
    UnknownDomainError,
    Worker,
)
from support.waiting import one, until, until_settled

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def ledger(bus: CommandBus, command_id: str) -> Ledger:
    found = bus.get_ledger("orders", command_id)
    assert found is not None
    assert found.seconds == pytest.approx(sum(item.seconds for item in found.intervals))
    edges = [
        (before.end, after.start) for before, after in zip(found.intervals, found.intervals[1:], strict=False)
    ]
    assert all(end == start for end, start in edges)
    return found


def labels(bus: CommandBus, command_id: str) -> list[str]:
    """What it did in order, without the moments in the queue."""
    return [item.label for item in ledger(bus, command_id).intervals if item.state != "queued"]


def test_delay_back_off_a_person_and_the_end(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> str | None:
        if ctx.attempt_number == 1:
            raise TransientCommandError("once more")
        if ctx.attempt_number == 2:
            raise PermanentCommandError("ask somebody")
        return "done"

    bus.send("orders", "ship", command_id="all", delay=0.2)
    bus.send("orders", "ship", command_id="late", delay=3600)
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE due_at IS NULL") == 0
    assert ledger(bus, "late").is_open
    assert labels(bus, "late") == ["delayed by its sender"]
    start_worker(handlers, retry_policy=RetryPolicy(max_attempts=5, backoff_schedule=[0.2], jitter=0))
    until(lambda: one(db, "SELECT count(*) FROM commandbus.tsq"))
    assert labels(bus, "all")[-1] == "with a person (troubleshooting)"
    bus.commands.operator_retry("orders", "all", operator="ann")
    bus.cancel("orders", "late")
    until_settled(db)
    found = ledger(bus, "all")
    assert labels(bus, "all") == [
        "delayed by its sender", "running", "backing off", "running", "with a person (troubleshooting)", "running",
    ]  # fmt: skip
    assert [(item.number, item.verdict) for item in found.attempts] == [
        (1, "RETRY"), (2, "PERMANENT"), (3, "COMPLETED"),
    ]  # fmt: skip
    (delay,) = db.execute("SELECT due_at - created_at FROM commandbus.command WHERE command_id = 'all'").fetchone()
    assert found.totals["delayed by its sender"] == pytest.approx(delay.total_seconds())
    assert found.totals["delayed by its sender"] >= 0.2
    assert found.totals["backing off"] == pytest.approx(0.2, abs=0.01)
    assert not found.is_open
    assert labels(bus, "late") == ["delayed by its sender"]


def test_a_plain_command_has_nothing_more_in_its_row(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "ship", lambda ctx: "done")
    bus.send("orders", "ship", command_id="plain")
    start_worker(handlers)
    until_settled(db)
    assert one(db, "SELECT due_at IS NULL AND spans IS NULL FROM commandbus.command")
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0
    assert labels(bus, "plain") == ["running"]


def test_a_pause_ends_when_it_is_resumed_not_when_a_worker_has_room(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    handlers.register("orders", "ship", lambda ctx: None)
    handlers.register("orders", "block", lambda ctx: go_on.wait(30))
    bus.pause("orders", "ship", operator="ann")
    bus.send("orders", "ship", command_id="held")
    start_worker(handlers, concurrency=1)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.parked"))
    bus.send("orders", "block", command_id="blocks")
    until(lambda: ledger(bus, "blocks").attempts)
    assert labels(bus, "held") == ["parked for pause"]
    bus.resume("orders", "ship", operator="ann")
    let_go = one(db, "SELECT retry_at FROM commandbus.attempt WHERE verdict = 'PARKED'")
    go_on.set()
    until_settled(db)
    found = ledger(bus, "held")
    parked = next(item for item in found.intervals if item.state == "parked")
    after = found.intervals[found.intervals.index(parked) + 1]
    assert (parked.reason, parked.end, after.state) == ("pause", let_go, "queued")


def test_a_wait_for_a_connection_and_a_grace_are_parts_of_their_attempt(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    @handlers.handler("orders", "hold")
    def hold(ctx: Any) -> None:
        with ctx.connection():
            go_on.wait(30)

    @handlers.handler("orders", "want")
    def want(ctx: Any) -> str:
        with ctx.transaction() as tx:
            tx.connection.execute("SELECT 1")
            tx.complete("had it")
        return None  # type: ignore[return-value]

    @handlers.handler("orders", "slow", timeout=0.3)
    def slow(ctx: Any) -> None:
        ctx.canceled.wait(30)
        threading.Event().wait(0.2)  # its grace is as long as that
        ctx.raise_if_canceled()

    start_worker(handlers, concurrency=3, pool_max_size=1, retry_policy=RetryPolicy(max_attempts=1))
    bus.send("orders", "hold", command_id="holds")
    until(lambda: ledger(bus, "holds").attempts)
    bus.send("orders", "want", command_id="wants")
    bus.send("orders", "slow", command_id="slow")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.tsq"))
    go_on.set()
    until_settled(db)
    assert "waiting for a connection" in labels(bus, "wants")
    assert labels(bus, "wants")[-1] == "running"
    assert one(db, "SELECT result #>> '{}' FROM commandbus.command WHERE command_id = 'wants'") == "had it"
    assert labels(bus, "slow") == ["running", "asked to stop, in its grace", "with a person (troubleshooting)"]
    assert ledger(bus, "slow").totals["running"] == pytest.approx(0.3, abs=0.15)


def test_a_turn_in_the_line_of_a_key_and_a_running_command(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    handlers.register("orders", "ship", lambda ctx: go_on.wait(30) and None)
    bus.key_limits.set("orders", "tenant", concurrency=1)
    for n in range(2):
        bus.send("orders", "ship", command_id=f"c{n}", key="a", key_limit="tenant")
    start_worker(handlers)
    until(lambda: ledger(bus, "c0").attempts)
    running = ledger(bus, "c0")
    assert (running.is_open, running.intervals[-1].state, running.attempts[0].verdict) == (True, "running", None)
    waiting = ledger(bus, "c1").intervals
    assert [item.label for item in waiting] == ["parked for its turn at key limit tenant"]
    until(lambda: ledger(bus, "c1").seconds > 1.1)
    go_on.set()
    until_settled(db)
    assert labels(bus, "c1") == ["parked for its turn at key limit tenant", "running"]
    assert labels(bus, "c0") == ["running"], "one that hardly waited gets no row"
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 1


def test_bad_names_and_the_async_bus(database: str, bus: CommandBus) -> None:
    bus.send("orders", "ship", command_id="one")
    assert bus.get_ledger("orders", "nobody") is None
    with pytest.raises(UnknownDomainError, match="nowhere"):
        bus.get_ledger("nowhere", "one")

    async def ask() -> Ledger | None:
        async with AsyncCommandBus(database) as own:
            return await own.get_ledger("orders", "one")

    found = asyncio.run(ask())
    assert found is not None
    assert [item.state for item in found.intervals] == ["queued"]


@pytest.mark.parametrize("reply_to", [None, "answers"])
def test_the_time_in_the_handlers_own_transaction_counts(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, reply_to: str | None
) -> None:
    """The server's now() is when that transaction began."""

    @handlers.handler("orders", "ship")
    def ship(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.connection.execute("SELECT pg_sleep(0.3)")
            tx.complete("done")

    bus.create_queue("answers")
    bus.send("orders", "ship", command_id="a", reply_to=reply_to)
    start_worker(handlers)
    until_settled(db)
    assert ledger(bus, "a").totals["running"] >= 0.3
