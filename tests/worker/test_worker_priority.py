"""Priorities in a running worker: high ones first, a share for low ones, and turns at a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, Worker
from commandbus.worker.claim_cursors import LOW_SHARE, DomainCursors
from support.waiting import one, statuses, until, until_settled

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


def test_a_limit_s_line_goes_by_priority(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, gate: threading.Event
) -> None:
    order: list[str] = []

    @handlers.handler("orders", "work", limits=[Limit("api", concurrency=1)])
    def work(ctx: Any) -> None:
        order.append(ctx.command.command_id)
        gate.wait(30)

    start_worker(handlers, concurrency=8)
    bus.send("orders", "work", command_id="first")
    until(lambda: order)
    for name, priority in (("low", "low"), ("normal", "normal"), ("high", "high")):
        bus.send("orders", "work", command_id=name, priority=priority)  # type: ignore[arg-type]
        until(lambda name=name: bus.get_command("orders", name).attempts)  # type: ignore[misc]
    until(lambda: one(db, "SELECT count(*) FROM commandbus.parked WHERE woken_at IS NULL") == 3)
    gate.set()
    until_settled(db)
    assert order == ["first", "high", "normal", "low"]
