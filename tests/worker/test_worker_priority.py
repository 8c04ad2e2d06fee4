"""Priorities in a running worker: high ones first, a share for low ones, and turns at a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, Saga, Snooze, Worker, step
from commandbus.flow.commands.claim import MILLENNIUM, Claim
from commandbus.worker.claim_cursors import LOW_IS_DUE, LOW_SHARE, MARGIN, DomainCursors
from support.waiting import one, statuses, until, until_settled
from support.workers import quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
SELDOM = {"poll_interval": 60.0}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_high_one_starts_next_at_a_saturated_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, concurrency: int
) -> None:
    order: list[str] = []
    go = threading.Semaphore(0)

    @handlers.handler("orders", "work")
    def work(ctx: Any) -> None:
        order.append(ctx.command.command_id)
        go.acquire(timeout=30)

    bus.send_many("orders", [NewCommand("work", command_id=f"n{n}") for n in range(40)])
    start_worker(handlers, concurrency=concurrency)

    def step() -> None:
        """Let one end, and wait until the next has started."""
        before = len(order)
        go.release()
        until(lambda: len(order) > before)

    until(lambda: len(order) == concurrency)
    for _ in range(8):
        step()
    bus.send("orders", "work", command_id="high", priority="high")
    held = one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'held_by' AND %s", True)
    steps = 0
    while "high" not in order:
        step()
        steps += 1
    assert steps <= held + concurrency + 2, order  # what it had claimed already, and a round that was under way
    go.release(100)
    until_settled(db)


def test_low_ones_get_their_share_and_no_more(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    order: list[str] = []
    handlers.register("orders", "work", lambda ctx: order.append(ctx.command.command_id[0]))
    bus.send_many("orders", [NewCommand("work", command_id=f"n{n}") for n in range(4000)])
    bus.send_many("orders", [NewCommand("work", command_id=f"l{n}", priority="low") for n in range(1000)])
    start_worker(handlers, concurrency=2)
    until_settled(db)
    assert 0.5 * LOW_SHARE < order[:3000].count("l") / 3000 < 2 * LOW_SHARE
    assert order.count("l") == 1000


def test_the_share_is_kept_over_small_claims() -> None:
    domain = DomainCursors("orders", is_routed=False)
    assert sum(domain.low_share(1) for _ in range(1000)) in (99, 100)
    domain.low.may_have_some = False
    assert sum(domain.low_share(8) for _ in range(1000)) == 0


def test_an_empty_claim_moves_the_cursor_of_its_band() -> None:
    """Else every look at the band would walk over what an open transaction keeps there."""
    domain, now = DomainCursors("orders", is_routed=False), datetime.now(UTC)
    empty, later = Claim([], [], False, None, None), now + timedelta(seconds=1)
    domain.high.advance(empty, domain.claimed_at)
    assert domain.high.cursor is None
    domain.advance(Claim([()], [], True, now, now))
    domain.high.advance(empty, domain.claimed_at)
    assert domain.high.cursor == now - MARGIN
    domain.high.advance(Claim([()], [], True, later, later), domain.claimed_at)
    domain.high.advance(empty, domain.claimed_at)
    assert domain.high.cursor == later
    domain.start_over()
    assert (domain.high.cursor, domain.high.may_have_some) == (None, True)
    domain.step_back(str((now - MILLENNIUM).timestamp()))
    domain.step_back("-Infinity")
    assert domain.low.cursor is None


def test_a_sweep_asks_for_a_band_only_if_something_is_due_there() -> None:
    domain, now = DomainCursors("orders", is_routed=False), datetime.now(UTC)
    for band in (domain.high, domain.low):
        band.advance(Claim([], [], False, None, None), now)
    domain.sweep(1.0)
    assert (domain.cursor, domain.high.cursor, domain.low.cursor) == (None, None, None)
    assert not domain.high.may_have_some
    assert not domain.low.may_have_some
    domain.note_others(LOW_IS_DUE)
    assert domain.low.may_have_some
    domain.note_others(LOW_IS_DUE, now)
    assert (domain.high.cursor, domain.low.cursor) == (now - MARGIN, None)
    assert not domain.high.may_have_some


@pytest.mark.parametrize("priority", ["high", "low"])
def test_a_command_that_nobody_heard_of_is_found(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, priority: Any
) -> None:
    handlers.register("orders", "work", lambda ctx: None)
    start_worker(handlers)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.waiting WHERE expires_at > now()"))
    db.execute("UPDATE commandbus.waiting SET expires_at = '-infinity'")  # a sender that sees no announcement
    bus.send("orders", "work", priority=priority)
    until_settled(db, 5.0)
    assert statuses(db) == {"COMPLETED": 1}


@pytest.mark.parametrize("priority", ["high", "low"])
def test_an_idle_worker_hears_of_each_priority(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, priority: Any
) -> None:
    handlers.register("orders", "work", lambda ctx: None)
    start_worker(handlers, **SELDOM)
    for n in range(3):
        until(lambda: one(db, "SELECT count(*) FROM commandbus.waiting WHERE expires_at > now()"))
        bus.send("orders", "work", priority=priority)
        until_settled(db, 5.0)
        assert statuses(db) == {"COMPLETED": n + 1}
    bus.send("orders", "work", priority=priority, delay=0.3)
    until_settled(db, 5.0)


def test_two_workers_finish_all_priorities_once(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    ran: list[str] = []
    handlers.register("orders", "work", lambda ctx: ran.append(ctx.command.command_id))
    start_worker(handlers, **SELDOM)
    start_worker(handlers, **SELDOM)
    for n in range(0, 600, 30):
        mixed = [
            NewCommand("work", command_id=f"{n + k}", priority=("low", None, "high")[k % 3])  # type: ignore[arg-type]
            for k in range(30)
        ]
        bus.send_many("orders", mixed)
    until_settled(db)
    assert sorted(map(int, ran)) == list(range(600))


@pytest.mark.parametrize("store", ["postgres", "redis"])
def test_a_limit_s_line_goes_by_priority(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    redis_url: str,
    store: Any,
) -> None:
    order: list[str] = []

    @handlers.handler("orders", "work", limits=[Limit("api", concurrency=1, store=store)])
    def work(ctx: Any) -> None:
        order.append(ctx.command.command_id)
        go_on.wait(30)

    start_worker(handlers, concurrency=8, **({"redis_url": redis_url} if store == "redis" else {}))
    bus.send("orders", "work", command_id="first")
    until(lambda: order)
    for name, priority in (("changed", "low"), ("low", "low"), ("normal", "normal"), ("high", "high")):
        bus.send("orders", "work", command_id=name, priority=priority)  # type: ignore[arg-type]
        until(partial(one, db, "SELECT waived FROM commandbus.command WHERE command_id = %s", name))
    until(lambda: one(db, "SELECT count(*) FROM commandbus.parked WHERE woken_at IS NULL") == 4)
    bus.commands.set_priority("orders", "changed", "high", operator="ann")
    go_on.set()
    until_settled(db)
    assert order == ["first", "changed", "high", "normal", "low"]


def test_a_worker_declares_the_priority_of_its_handlers(
    bus: CommandBus,
    db: Db,
    database: str,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
) -> None:
    order: list[str] = []

    def work(ctx: Any) -> None:
        order.append(ctx.command.command_type)
        go_on.wait(30)

    handlers.register("orders", "work", work)
    handlers.register("orders", "pay", work, priority="high")
    handlers.register("orders", "tidy", work, priority="low")
    start_worker(handlers, concurrency=1)
    bus.send("orders", "work")
    until(lambda: order)
    with CommandBus(database) as other:  # a program that knows nothing of the handlers
        for kind in ("tidy", "work", "pay"):
            other.send("orders", kind, command_id=kind)
    assert [bus.get_command("orders", kind).priority for kind in ("tidy", "work", "pay")] == [  # type: ignore[union-attr]
        "low", "normal", "high",
    ]  # fmt: skip
    go_on.set()
    until_settled(db)
    assert sorted(order) == ["pay", "tidy", "work", "work"]


def test_a_process_s_step_has_the_priority_of_its_handler(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    bus.create_domain("processes")
    handlers.register("orders", "pay", lambda ctx: None, priority="high")
    saga = Saga("order", step("pay", "orders"))
    handlers.register_process(saga)
    start_worker(handlers)
    bus.start_process(saga, {}, process_id="p")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.process WHERE finished_at IS NOT NULL"))
    assert one(db, "SELECT priority FROM commandbus.command WHERE command_type = 'pay'") == 1


def test_until_idle_runs_what_has_low_or_high_priority(
    bus: CommandBus, db: Db, database: str, handlers: HandlerRegistry
) -> None:
    handlers.register("orders", "work", lambda ctx: None)
    for priority in ("low", "high"):
        bus.send("orders", "work", priority=priority)  # type: ignore[arg-type]
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    assert statuses(db) == {"COMPLETED": 2}


def test_what_was_snoozed_keeps_its_priority(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: set[str] = set()

    @handlers.handler("orders", "work")
    def work(ctx: Any) -> None:
        if ctx.command.command_id not in seen:
            seen.add(ctx.command.command_id)
            raise Snooze(0.3, "not yet")

    bands = (
        "SELECT count(*) FROM pgmq.q_orders__commands "
        "WHERE headers IS NULL AND (vt < '1500-01-01' OR vt > '2500-01-01')"
    )
    start_worker(handlers, **SELDOM)
    for priority in ("low", "high"):
        bus.send("orders", "work", priority=priority)  # type: ignore[arg-type]
    until(lambda: one(db, bands))
    until_settled(db, 5.0)
    assert one(db, "SELECT array_agg(priority ORDER BY id) FROM commandbus.command") == [-1, 1]


@pytest.mark.parametrize("priority", ["high", "low"])
def test_an_idle_worker_does_not_spin_over_a_command_that_it_cannot_claim(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, database: str, priority: Any
) -> None:
    """Somebody has locked its row: the worker looks again every 50 ms, and not at once."""
    handlers.register("orders", "work", lambda ctx: None)
    with psycopg.connect(database) as holder:
        bus.send("orders", "work", priority=priority)
        holder.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        worker = start_worker(handlers, **SELDOM)
        rounds: list[float] = []
        claimer = worker._runtime._claimer  # type: ignore[union-attr]
        ask = claimer._next_due
        claimer._next_due = lambda *given: rounds.append(0) or ask(*given)  # type: ignore
        until(lambda: len(rounds) > 3)
        began, before = time.monotonic(), len(rounds)
        until(lambda: len(rounds) >= before + 5)
        assert time.monotonic() - began > 5 * 0.04
    until_settled(db, 5.0)
