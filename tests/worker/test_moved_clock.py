"""A handler that moves the clocks of its process, as freezegun does: no neighbor is stopped or charged for it."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import commandbus
from commandbus import CommandBus, HandlerRegistry, Worker, clock
from support.waiting import one, until, until_settled
from support.workers import add, done, opened, short_lease

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
REAL = (time.monotonic, time.time)
FOLDERS = ("worker", "limits", "bus", "db", "model", "flow")


@pytest.fixture
def clocks() -> Iterator[Callable[[float, float], None]]:
    """Moves the process's clocks: `clocks(factor, seconds)`; put back at the end."""
    monotonic, wall = REAL

    def move(factor: float, seconds: float) -> None:
        start, wall_start = monotonic(), wall()
        time.monotonic = lambda: start + (monotonic() - start) * factor + seconds
        time.time = lambda: wall_start + (wall() - wall_start) * factor + seconds

    yield move
    time.monotonic, time.time = REAL


@pytest.mark.parametrize(("factor", "seconds"), [(1.0, 7200.0), (0.0, 0.0), (1.0, -7200.0)])
def test_a_handler_that_moves_the_clock_harms_no_neighbor(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
    clocks: Callable[[float, float], None],
    factor: float,
    seconds: float,
) -> None:
    beside = threading.Event()
    left: list[float] = []

    async def neighbor(command: Any, ctx: Any) -> str:
        beside.set()
        await opened(go_on)
        left.append(ctx.remaining())
        return "done"

    add(handlers, lane, "neighbor", neighbor, timeout=30)
    handlers.register("orders", "mover", lambda ctx: clocks(factor, seconds))
    start_worker(handlers, **short_lease())
    bus.send("orders", "neighbor", command_id="n", max_attempts=1)
    assert beside.wait(60)
    bus.send("orders", "mover", command_id="m", max_attempts=1)
    first_end = one(db, "SELECT vt FROM pgmq.q_orders__commands ORDER BY msg_id LIMIT 1")
    # Its lease is renewed with the clocks moved, and the ladder has looked at it several times.
    until(lambda: one(db, "SELECT now() > %s + interval '0.5 s'", first_end))
    go_on.set()
    until_settled(db)
    found = bus.get_command("orders", "n")
    assert found is not None
    assert (found.result, found.attempts) == ("done", 1)
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0
    assert 20 < left[0] < 30
    assert one(db, "SELECT bool_and(abs(extract(epoch FROM now() - started_at)) < 60) FROM commandbus.command")


def test_timers_of_async_neighbors_go_on_while_the_clock_stands_still(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    clocks: Callable[[float, float], None],
) -> None:
    @handlers.handler("orders", "neighbor", timeout=5)
    async def neighbor(ctx: Any) -> str:
        clocks(0.0, 0.0)
        await asyncio.sleep(0.3)
        await done(ctx.sleep(0.1))
        async with ctx.child(timeout=2):
            await asyncio.sleep(0.1)
        return "done"

    start_worker(handlers)
    bus.send("orders", "neighbor", command_id="n", max_attempts=1)
    until_settled(db)
    found = bus.get_command("orders", "n")
    assert found is not None
    assert found.result == "done"


def test_our_clocks_are_those_of_the_system() -> None:
    assert abs(clock.monotonic() - REAL[0]()) < 1
    assert abs(clock.epoch() - REAL[1]()) < 1
    assert clock.boottime() >= clock.monotonic() - 1
    # They differ only after the machine was suspended, so what they read is asked instead.
    assert clock.boottime.args == (time.CLOCK_BOOTTIME,)  # type: ignore[attr-defined]
    assert clock.monotonic.args == (time.CLOCK_MONOTONIC,)  # type: ignore[attr-defined]


def test_no_module_beside_handlers_reads_a_clock_that_they_can_replace() -> None:
    """Read `commandbus.clock` instead: its functions are bound at import."""
    package = Path(commandbus.__file__).parent
    reading = re.compile(r"\btime\.(monotonic|time|monotonic_ns|time_ns|perf_counter)\b|from time import")
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for folder in FOLDERS
        for path in sorted((package / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reading.search(line)
    ]
    assert found == []
