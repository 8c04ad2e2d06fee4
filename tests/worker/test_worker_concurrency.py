"""How many attempts run at once: never more than `concurrency` over both lanes, and that many if there is work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from commandbus import CommandBus, HandlerRegistry, NewCommand, Worker
from commandbus.worker.execution.async_slots import AsyncSlots
from commandbus.worker.execution.concurrency import ConcurrencyBudget
from commandbus.worker.execution.slots import Slots
from support.waiting import one, statuses, until, until_settled
from support.workers import add, opened

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


class Crowd:
    """Counts who is inside, and the most there ever were."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.entered = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.entered += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1


def _mixed(handlers: HandlerRegistry, crowd: Crowd) -> None:
    @handlers.handler("orders", "sync")
    def work(ctx: Any) -> None:
        with crowd:
            time.sleep(0.004)

    @handlers.handler("orders", "async")
    async def work_async(ctx: Any) -> None:
        with crowd:
            await asyncio.sleep(0.004)


def test_never_more_than_concurrency_over_both_lanes(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    crowd = Crowd()
    _mixed(handlers, crowd)
    bus.send_many("orders", [NewCommand("sync" if n % 3 else "async") for n in range(400)])
    start_worker(handlers, concurrency=5)
    until_settled(db)
    assert crowd.entered == 400
    assert crowd.most == 5


def test_as_many_as_concurrency_when_handlers_block(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    crowd = Crowd()

    async def block(command: Any, ctx: Any) -> None:
        with crowd:
            await opened(go_on)

    add(handlers, lane, "block", block)
    bus.send_many("orders", [NewCommand("block") for _ in range(20)])
    start_worker(handlers, concurrency=7)
    until(lambda: crowd.inside == 7)
    # What does not run is not held either: it is there for other workers.
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'held_by'") == 7
    go_on.set()
    until_settled(db)
    assert (crowd.most, crowd.entered) == (7, 20)


def test_both_lanes_together_fill_the_places(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    crowd = Crowd()

    async def block(command: Any, ctx: Any) -> None:
        with crowd:
            await opened(go_on)

    add(handlers, "sync", "sync", block)
    add(handlers, "async", "async", block)
    bus.send_many("orders", [NewCommand("sync" if n % 2 else "async") for n in range(16)])
    start_worker(handlers, concurrency=6)
    until(lambda: crowd.inside == 6)
    go_on.set()
    until_settled(db)
    assert (crowd.most, crowd.entered) == (6, 16)


def test_one_blocked_lane_leaves_the_other_its_places(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    crowd = Crowd()

    async def block(command: Any, ctx: Any) -> None:
        with crowd:
            await opened(go_on)

    async def quick(command: Any, ctx: Any) -> None: ...

    add(handlers, lane, "block", block)
    add(handlers, "async" if lane == "sync" else "sync", "quick", quick)
    bus.send_many("orders", [NewCommand("block") for _ in range(2)])
    start_worker(handlers, concurrency=3)
    bus.send_many("orders", [NewCommand("quick") for _ in range(200)])
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 200)
    assert crowd.inside == 2
    go_on.set()
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 202}


class _Pushed:
    stop = None


class _Lanes:
    """Both lanes before one set of places, fed by hand: an attempt is whatever was pushed."""

    def __init__(self, total: int, seconds: float) -> None:
        self.crowd = Crowd()
        self.ran: dict[str, int] = {"sync": 0, "async": 0}
        self._seconds = seconds
        budget = ConcurrencyBudget(total)
        self.slots = Slots(budget, self._run, name="test", on_thread=lambda _: None)
        self.loop = AsyncSlots(budget, self._run_async, name="test", first=total, on_thread=lambda _: None)
        self.slots.share_with_others()
        self.loop.share_with_others()
        self.slots.start()
        self.loop.start()

    def _run(self, attempt: Any, slot: Any) -> bool:
        with self.crowd:
            time.sleep(self._seconds)
        self.ran["sync"] += 1
        return True

    async def _run_async(self, attempt: Any, slot: Any) -> bool:
        with self.crowd:
            await asyncio.sleep(self._seconds)
        self.ran["async"] += 1
        return True

    def close(self) -> None:
        self.slots.take_back()
        self.loop.take_back()
        until(lambda: self.crowd.inside == 0)
        self.slots.stop()
        self.loop.stop(5)


def test_a_flood_in_one_lane_does_not_starve_the_other(lane: str) -> None:
    lanes = _Lanes(4, 0.001)
    try:
        flooded, other = (lanes.slots, lanes.loop) if lane == "sync" else (lanes.loop, lanes.slots)
        name = "async" if lane == "sync" else "sync"
        flooded.push([_Pushed()] * 20_000)  # type: ignore[list-item]
        until(lambda: lanes.ran[lane] > 50)
        other.push([_Pushed()] * 200)  # type: ignore[list-item]
        until(lambda: lanes.ran[name] == 200, 10)
        # A fair share is half: the 200 must not have waited for more than a few times as many of the flood.
        assert flooded.waiting
        assert lanes.ran[lane] < 2_000
        assert lanes.crowd.most == 4
    finally:
        lanes.close()


def test_no_command_is_left_behind_by_lazy_waking(lane: str) -> None:
    """Pushes of every size, at every moment of the slots' falling asleep."""
    lanes = _Lanes(3, 0.0)
    try:
        target = lanes.slots if lane == "sync" else lanes.loop
        pushed = 0
        for round_ in range(300):
            size = round_ % 5 + 1
            target.push([_Pushed()] * size)  # type: ignore[list-item]
            pushed += size
            if round_ % 3 == 0:
                until(lambda expected=pushed: lanes.ran[lane] == expected, 5)
        until(lambda: lanes.ran[lane] == pushed, 5)
    finally:
        lanes.close()
    assert sum(lanes.ran.values()) == lanes.crowd.entered == pushed


def test_commands_that_all_find_an_idle_slot_wake_nobody_else() -> None:
    """The ticker would compete with the slots for the GIL, and delay what it is not needed for."""
    others = set(threading.enumerate())  # a ticker of an earlier test may still be about to end
    lanes = _Lanes(3, 0.0)
    try:
        (ticker,) = [each for each in threading.enumerate() if each.name == "test-ticker" and each not in others]
        until(lambda: _naps(ticker) > 0)  # it sleeps
        before = _naps(ticker)
        for pushed in range(2, 42, 2):
            until(lambda: len(lanes.slots._idle) == 3)
            lanes.slots.push([_Pushed()] * 2)  # type: ignore[list-item]
            until(lambda expected=pushed: lanes.ran["sync"] == expected, 5)
        assert _naps(ticker) == before
        lanes.slots.push([_Pushed()] * 200)  # type: ignore[list-item]
        until(lambda: _naps(ticker) > before)
    finally:
        lanes.close()


def _naps(thread: threading.Thread) -> int:
    """How often it has gone to sleep, as the kernel counts."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary")).split()[1])


# --- no prefetch for slow handlers ----------------------------------------------------------------------------


def test_slow_commands_are_spread_over_workers(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    crowd = Crowd()

    async def block(command: Any, ctx: Any) -> None:
        with crowd:
            await opened(go_on)

    add(handlers, lane, "block", block)
    for _ in range(2):
        start_worker(handlers, concurrency=3)
    bus.send_many("orders", [NewCommand("block") for _ in range(6)])
    until(lambda: crowd.inside == 6)
    holders = dict(db.execute("SELECT headers ->> 'held_by', count(*) FROM pgmq.q_orders__commands GROUP BY 1"))
    assert sorted(holders.values()) == [3, 3]
    go_on.set()
    until_settled(db)


def test_what_a_fast_worker_prefetched_does_not_wait_behind_slow_commands(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    """A worker that was fast a moment ago has prefetched slow commands: another one, idle, must get them."""
    crowd = Crowd()

    async def block(command: Any, ctx: Any) -> None:
        with crowd:
            await opened(go_on)

    async def quick(command: Any, ctx: Any) -> None: ...

    add(handlers, lane, "block", block)
    add(handlers, lane, "quick", quick)
    bus.send_many("orders", [NewCommand("quick") for _ in range(3000)])
    bus.send_many("orders", [NewCommand("block") for _ in range(8)])
    start_worker(handlers, concurrency=4)
    until(lambda: crowd.inside == 4)
    start_worker(handlers, concurrency=4)
    until(lambda: crowd.inside == 8, 8)
    go_on.set()
    until_settled(db)
    assert crowd.entered == 8
