"""Key limits beside running workers: never exceeded, fair, in order, also when workers are killed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, NewCommand, TransientCommandError, TroubleshootingQueue, Worker
from commandbus.errors import PermanentCommandError
from support.waiting import one, until, until_settled
from support.workers import quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


class Seen:
    """Counts what runs at once, per key, and remembers the order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.order: dict[str, list[int]] = {}

    def handle(self, command: Any, ctx: Any) -> None:
        key, number = command.data
        with self.lock:
            self.running[key] += 1
            self.most[key] = max(self.most[key], self.running[key])
            self.order.setdefault(key, []).append(number)
        time.sleep(0.002)  # long enough for others to begin
        with self.lock:
            self.running[key] -= 1


def keyed(key: str, numbers: range, limit: str = "tenant") -> list[NewCommand]:
    return [NewCommand("ship", [key, n], key=key, key_limit=limit) for n in numbers]


def lines_are_empty(db: Db) -> bool:
    return bool(one(db, "SELECT count(*) FROM commandbus.keyed") == 0)


def test_a_key_never_has_more_at_once_than_it_may(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen = Seen()
    handlers.register("orders", "ship", seen.handle)
    bus.key_limits.set("orders", "tenant", concurrency=3)
    for _ in range(2):
        start_worker(handlers)
    for key in ("a", "b"):
        bus.send_many("orders", keyed(key, range(60)))
    bus.send("orders", "ship", ["c", 0], key="c", key_limit="tenant")
    until_settled(db)
    assert {key: len(order) for key, order in seen.order.items()} == {"a": 60, "b": 60, "c": 1}
    assert max(seen.most.values()) <= 3
    until(lambda: lines_are_empty(db))


def test_an_ordered_key_runs_one_after_the_other_also_across_retries(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen, failed = Seen(), set[tuple[str, int]]()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        key, number = command.data
        if number % 3 == 0 and (key, number) not in failed:
            failed.add((key, number))
            raise TransientCommandError("not yet")
        seen.handle(command, ctx)

    bus.key_limits.set("orders", "order", concurrency=1, ordered=True)
    for _ in range(2):
        start_worker(handlers)
    for n in range(12):
        bus.send_many("orders", keyed("a", range(n, n + 1), "order") + keyed("b", range(n, n + 1), "order"))
    until_settled(db)
    assert seen.order == {"a": list(range(12)), "b": list(range(12))}
    assert max(seen.most.values()) == 1


@pytest.mark.parametrize("on_failure", ["block", "step_aside"])
def test_a_command_in_the_troubleshooting_queue_blocks_its_key_or_steps_aside(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, on_failure: Any
) -> None:
    seen, may = Seen(), threading.Event()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        if command.data[1] == 0 and not may.is_set():
            raise PermanentCommandError("broken")
        seen.handle(command, ctx)

    bus.key_limits.set("orders", "order", ordered=True, on_failure=on_failure)
    sent = bus.send_many("orders", keyed("a", range(3), "order"))
    start_worker(handlers)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.tsq") == 1)
    if on_failure == "step_aside":
        until(lambda: seen.order == {"a": [1, 2]})
    else:
        (line,) = bus.key_limits.lines("orders", "order")
        assert (line.released, line.waiting, line.blocked_by) == (1, 2, sent[0].command_id)
        assert seen.order == {}
    may.set()
    TroubleshootingQueue(bus).operator_retry("orders", sent[0].command_id, operator="ada")
    until_settled(db)
    assert seen.order == {"a": [1, 2, 0] if on_failure == "step_aside" else [0, 1, 2]}
    until(lambda: lines_are_empty(db))


def test_canceled_commands_leave_the_line(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen = Seen()
    handlers.register("orders", "ship", seen.handle)
    bus.key_limits.set("orders", "order", ordered=True)
    sent = bus.send_many("orders", keyed("a", range(4), "order"))
    for receipt in sent[:2]:
        bus.cancel("orders", receipt.command_id)
    start_worker(handlers)
    until_settled(db)
    assert seen.order == {"a": [2, 3]}
    until(lambda: lines_are_empty(db))


def test_an_override_stops_one_key_for_a_time(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen = Seen()
    handlers.register("orders", "ship", seen.handle)
    bus.key_limits.set("orders", "tenant", concurrency=2)
    bus.key_limits.override("orders", "tenant", "a", concurrency=0, until="1h")
    start_worker(handlers)
    bus.send_many("orders", keyed("a", range(3)) + keyed("b", range(3)))
    until(lambda: len(seen.order.get("b", [])) == 3)
    assert "a" not in seen.order
    bus.key_limits.override("orders", "tenant", "a", concurrency=3, until="1h")
    until_settled(db)
    assert len(seen.order["a"]) == 3


def test_one_key_with_many_commands_does_not_delay_the_others(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    ended: list[str] = []

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        ended.append(command.data[0])

    bus.key_limits.set("orders", "tenant", concurrency=2)
    bus.send_many("orders", keyed("big", range(1500)))
    bus.send_many("orders", [new for n in range(10) for new in keyed(f"small-{n}", range(5))])
    start_worker(handlers)
    until(lambda: sum(key != "big" for key in ended) == 50)
    assert ended.count("big") < 1000


def test_a_worker_that_runs_until_idle_runs_the_whole_line(bus: CommandBus, handlers: HandlerRegistry) -> None:
    seen = Seen()
    handlers.register("orders", "ship", seen.handle)
    bus.key_limits.set("orders", "order", ordered=True)
    bus.send_many("orders", keyed("a", range(20), "order"))
    Worker(handlers, settings=quick_settings(bus.settings.database_url)).run(until_idle=True)
    assert seen.order == {"a": list(range(20))}
