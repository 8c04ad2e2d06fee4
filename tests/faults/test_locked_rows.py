"""Somebody's lock on a single row of each table that our own threads write: it holds up that row, and no other.

Another application may lock any row, for as long as it likes. Whatever needs that row waits; everything else of
the worker goes on at its usual speed, and when the lock is gone the rest follows unaided.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, HealthState, Limit, NewCommand, Worker
from support.waiting import Stopwatch, one, statuses, until, until_settled, verdicts

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
LOOK_SECONDS = 8.0  # longer than a lock is waited for, and than the pauses after it
LOCK_SECONDS = 2.0  # how long a thread waits for a lock
SLOWEST_SECONDS = 4.0  # of the others: a thread that meets the lock waits for it once


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def handlers(release: threading.Event, bus: CommandBus) -> HandlerRegistry:
    """`work`; `held`, which waits for `release`; `call` and `other`, which need a permit of a limit each."""
    bus.declare_limit(Limit("api", concurrency=5))
    bus.declare_limit(Limit("other", concurrency=5))
    handlers = HandlerRegistry()

    def held(ctx: Any) -> str:
        assert release.wait(40)
        return "held"

    handlers.register("orders", "work", lambda ctx: "done")
    handlers.register("orders", "held", held, timeout=60)
    handlers.register("orders", "call", lambda ctx: "done", limits=["api"])
    handlers.register("orders", "other", lambda ctx: "done", limits=["other"])
    return handlers


@contextmanager
def holding(database: str, statement: str) -> Iterator[Db]:
    """A transaction that stays open."""
    with psycopg.connect(database) as conn:
        assert conn.execute(statement.encode()).rowcount > 0, "there is such a row"
        yield conn
        conn.rollback()


def slowest(bus: CommandBus, command_type: str = "work", *, many: int = 1) -> float:
    """Sends commands one after the other for a while; how long did one of them take at most?"""
    longest, end, number = 0.0, monotonic() + LOOK_SECONDS, 0
    while monotonic() < end:
        number += 1
        watch = Stopwatch()
        ids = [f"{command_type}-{number}-{n}" for n in range(many)]
        bus.send_many("orders", [NewCommand(command_type, command_id=id_) for id_ in ids])

        def all_are(ids: list[str] = ids) -> bool:
            found = [bus.get_command("orders", id_) for id_ in ids]
            return all(record is not None and record.status == "COMPLETED" for record in found)

        until(all_are, 30)
        longest = max(longest, watch.seconds(waits=LOCK_SECONDS))
    return longest


ROWS = {
    "queue row": "SELECT FROM pgmq.q_orders__commands WHERE headers ? 'held_by' FOR UPDATE",
    "command row": "SELECT FROM commandbus.command WHERE command_id = 'x' FOR UPDATE",
    "worker row": "SELECT FROM commandbus.worker FOR UPDATE",
    "waiting row": "SELECT FROM commandbus.waiting FOR UPDATE",
    "batch row": "SELECT FROM commandbus.batch FOR UPDATE",
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_the_others_go_on(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    release: threading.Event,
    row: str,
) -> None:
    worker = start_worker(handlers, database, concurrency=8)
    bus.create_batch("orders", [NewCommand("held", command_id="x")], batch_id="b")
    until(lambda: worker._runtime.attempts.running)  # type: ignore[union-attr]
    until(lambda: one(db, "SELECT count(*) FROM commandbus.worker"))
    until(lambda: one(db, "SELECT count(*) FROM commandbus.waiting"))
    with holding(database, ROWS[row]):
        release.set()
        assert slowest(bus, many=20) < SLOWEST_SECONDS
        assert worker.health_status.state is HealthState.HEALTHY, worker.health_status.reasons
    until_settled(db, 15)
    until(lambda: bus.get_batch("orders", "b").status == "COMPLETED", 40)  # type: ignore[union-attr]
    assert set(statuses(db)) == {"COMPLETED"}
    assert verdicts(db, "x") == []
    assert worker.stop().is_clean


@pytest.mark.slow
def test_many_locked_command_rows(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    release: threading.Event,
) -> None:
    worker = start_worker(handlers, database, concurrency=12)
    bus.send_many("orders", [NewCommand("held", command_id=f"x{n}") for n in range(10)])
    until(lambda: len(worker._runtime.attempts.running) == 10)  # type: ignore[union-attr]
    with holding(database, "SELECT FROM commandbus.command WHERE command_type = 'held' FOR UPDATE"):
        release.set()
        assert slowest(bus, many=20) < SLOWEST_SECONDS
    until_settled(db, 20)
    assert set(statuses(db)) == {"COMPLETED"}
    assert worker.stop().is_clean


@pytest.mark.slow
def test_a_locked_limit_holds_up_those_that_need_it(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    worker = start_worker(handlers, database, concurrency=8)
    with holding(database, "SELECT FROM commandbus.limits WHERE name = 'api' FOR UPDATE"):
        bus.send("orders", "call", command_id="x")
        assert slowest(bus, "other", many=5) < SLOWEST_SECONDS
    until_settled(db, 20)
    assert set(statuses(db)) == {"COMPLETED"}
    assert worker.stop().is_clean


@pytest.mark.slow
def test_a_call_inside_a_handler_waits_for_a_locked_limit_and_gets_its_permit(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """`ctx.limit` of one limit waits; `ctx.limit` of another is answered at once. What was told is not lost."""
    told: dict[str, float] = {}

    @handlers.handler("orders", "inside", timeout=60)
    def inside(command: Any, ctx: Any) -> None:
        began = monotonic()
        with ctx.limit(command.data, wait=30):
            told[command.command_id] = monotonic() - began

    worker = start_worker(handlers, database, concurrency=8)
    bus.send("orders", "inside", "other", command_id="before")
    until(lambda: "before" in told)
    with holding(database, "SELECT FROM commandbus.limits WHERE name = 'api' FOR UPDATE"):
        bus.send("orders", "inside", "api", command_id="x")
        until(lambda: worker._runtime.attempts.running)  # type: ignore[union-attr]
        assert slowest(bus, "other", many=2) < SLOWEST_SECONDS
        bus.send("orders", "inside", "other", command_id="beside")
        until(lambda: "beside" in told)
        assert told["beside"] < SLOWEST_SECONDS
        assert "x" not in told
    until_settled(db, 20)
    assert "x" in told
    assert set(statuses(db)) == {"COMPLETED"}
    until(
        lambda: (
            one(db, "SELECT sum((SELECT count(*) FROM jsonb_object_keys(holders))) FROM commandbus.limits") == 0
        )
    )
    assert worker.stop().is_clean
