"""Why a command does not run now: its place in line, and what would have to happen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from commandbus import AsyncCommandBus, CommandBus, HandlerRegistry, NewCommand, WhyWaiting, Worker
from support.waiting import until, until_settled

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def why(bus: CommandBus, command_id: str) -> WhyWaiting:
    found = bus.why_waiting("orders", command_id)
    assert found is not None
    return found


def test_the_place_in_the_queue_counts_what_is_due_before_it(bus: CommandBus) -> None:
    bus.send_many("orders", [NewCommand("ship", command_id=f"c{n}") for n in range(5)])
    bus.send("orders", "ship", command_id="later", delay=3600, priority="high")
    bus.send("orders", "ship", command_id="low", priority="low")
    bus.send("orders", "ship", command_id="high", priority="high")
    assert (why(bus, "high").ahead, why(bus, "c0").ahead) == (0, 1)
    assert (why(bus, "c4").ahead, why(bus, "low").ahead) == (5, 6)
    assert why(bus, "c4").text == "no worker of domain orders runs; 5 before it in the queue"
    assert why(bus, "high").waits
    later = why(bus, "later")
    assert later.text.startswith("it may run in about 1h")
    assert later.text.endswith("(its sender wanted it later)")
    bus.cancel("orders", "c1")
    assert (why(bus, "c1").text, why(bus, "c1").waits) == ("it was canceled", False)
    assert bus.why_waiting("orders", "nobody") is None


def test_beside_a_worker(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
) -> None:
    handlers.register("orders", "ship", lambda ctx: go_on.wait(30) and None)
    start_worker(handlers, concurrency=2)  # one slot is free for a claim that finds the paused command
    bus.send("orders", "ship", command_id="runs")
    until(lambda: why(bus, "runs").text.startswith("it runs: worker test"))
    bus.pause("orders", "bill", operator="ann", reason="the printer")
    bus.send("orders", "bill", command_id="paused")
    until(lambda: (bus.get_command("orders", "paused") or why).waiting_for == "pause")  # type: ignore[union-attr]
    assert why(bus, "paused").waits
    bus.send_many("orders", [NewCommand("ship", command_id=f"c{n}") for n in range(40)])
    last = until(lambda: (found := why(bus, "c39")).ahead and found)
    assert last.text.startswith(f"it waits for a free slot: {last.ahead} before it in the queue")

    async def ask() -> WhyWaiting | None:
        async with AsyncCommandBus(database) as own:
            return await own.why_waiting("orders", "runs")

    assert asyncio.run(ask()) == why(bus, "runs")
    go_on.set()
    bus.resume("orders", "bill", operator="ann")
    bus.cancel("orders", "paused")
    until_settled(db)
    assert why(bus, "runs") == WhyWaiting("it has completed")
