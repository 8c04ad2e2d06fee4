"""Breakers and the volume of a type, in running workers: a few that hang among many open nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg

from commandbus import CommandBus, HandlerRegistry, NewCommand, RetryPolicy, Worker
from commandbus.model.breaker import Breaker
from support.waiting import one, until, until_settled

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
ON = {"breakers_enabled": True, "max_attempts": 1, "task_timeout": 0.5, "cancel_grace": 0.2, "concurrency": 4}


def moves(db: Db) -> list[str]:
    rows = db.execute("SELECT action FROM commandbus.control_action WHERE operator = 'commandbus' ORDER BY id")
    return [action for (action,) in rows]


def until_judged(db: Db, workers: int) -> None:
    """Until all workers have told their counts as of the last bad attempt, and have looked again since."""
    told = (
        "SELECT count(*) FROM commandbus.worker w, commandbus.breaker b "
        "WHERE (w.counts -> 'orders/ship' ->> 'told_at')::float8 >= (b.recent -> -1 ->> 3)::float8"
    )
    until(lambda: one(db, told) == workers, 30)
    last = one(db, "SELECT max(heartbeat_at) FROM commandbus.worker")
    until(lambda: one(db, "SELECT min(heartbeat_at) > %s + interval '3 s' FROM commandbus.worker", last), 30)


def test_five_hanging_among_a_thousand_good_park_nobody(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    begun = threading.Semaphore(0)

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        if command.data == "hang":
            begun.release()
            go_on.wait(60)

    for _ in range(2):
        start_worker(handlers, **ON)
    bus.send_many("orders", [NewCommand("ship", "hang") for _ in range(5)])
    for _ in range(5):
        assert begun.acquire(timeout=20)
    bus.send_many("orders", [NewCommand("ship", n) for n in range(1000)])
    until_settled(db, 60)
    until(lambda: [info.stuck for info in bus.breakers()] == [5], 30)
    until_judged(db, 2)
    (info,) = bus.breakers()
    assert (info.state, info.stuck) == ("CLOSED", 5)
    assert info.others >= 500
    assert moves(db) == []
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'PARKED'") == 0


def test_after_very_many_successes_the_first_full_round_of_stuck_slots_opens_it(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """More of them than a worker remembers, as after an hour. Then as many hang as there are slots."""
    is_bad = threading.Event()

    @handlers.handler("orders", "ship")
    def ship(ctx: Any) -> None:
        if is_bad.is_set():
            go_on.wait(60)

    for _ in range(2):
        start_worker(handlers, **ON)
    bus.send_many("orders", [NewCommand("ship") for _ in range(1500)])
    until_settled(db, 60)
    is_bad.set()
    bus.send_many("orders", [NewCommand("ship") for _ in range(8)])
    until(lambda: moves(db) == ["OPEN"], 30, what=lambda: bus.breakers())
    (info,) = bus.breakers()
    assert (info.state, info.stuck) == ("OPEN", 8)
    assert (info.reason or "").startswith(("8 of 8 attempts stuck since", "5 of 5", "6 of 6", "7 of 7"))


def test_one_worker_has_the_trouble_and_another_the_successes(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """The fleet counts, not one worker: everything hangs in one of them, and the other does well."""
    begun = threading.Semaphore(0)

    @handlers.handler("orders", "ship")
    def hang(ctx: Any) -> None:
        begun.release()
        go_on.wait(60)

    start_worker(handlers, **ON | {"concurrency": 5, "max_attempts": 1, "task_timeout": 2})
    bus.send_many("orders", [NewCommand("ship") for _ in range(5)])
    for _ in range(5):
        assert begun.acquire(timeout=20)
    well = HandlerRegistry()
    well.register("orders", "ship", lambda ctx: "done")
    start_worker(well, **ON)
    bus.send_many("orders", [NewCommand("ship") for _ in range(100)])
    until_settled(db, 60)
    until(lambda: [info.stuck for info in bus.breakers()] == [5], 30)
    until_judged(db, 2)
    assert [(info.state, info.others) for info in bus.breakers()] == [("CLOSED", 100)]
    assert moves(db) == []


def test_what_a_stopped_worker_has_counted_stays_of_use(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    begun = threading.Semaphore(0)

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        if command.data == "hang":
            begun.release()
            go_on.wait(60)

    worker = start_worker(handlers, **ON)
    bus.send_many("orders", [NewCommand("ship", "hang") for _ in range(3)])
    for _ in range(3):
        assert begun.acquire(timeout=20)
    bus.send_many("orders", [NewCommand("ship", n) for n in range(100)])
    until_settled(db, 60)
    worker.stop(wait=10)
    start_worker(handlers, **ON)
    bus.send_many("orders", [NewCommand("ship", "hang") for _ in range(3)])
    until(lambda: [info.stuck for info in bus.breakers()] == [6], 30)
    (info,) = bus.breakers()
    assert info.others >= 100
    told = "SELECT (counts -> 'orders/ship' -> 'others' ->> 0)::int FROM commandbus.worker WHERE state = 'STOPPED'"
    assert one(db, told) == 100


def test_after_the_last_fault_everything_drains_and_nothing_stays_parked(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """Some hang at their first try all along; for a while everything does, so that the breaker opens, too."""
    is_down = threading.Event()
    lock = threading.Lock()
    tried: set[str] = set()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        with lock:
            is_first = command.command_id not in tried
            tried.add(command.command_id)
        if is_down.is_set() or (is_first and command.data % 20 == 0):
            go_on.wait(60)

    more = {"breakers": {"*": Breaker(reset=1.0)}, "task_timeout": 0.3, "max_attempts": 10}
    for _ in range(2):
        start_worker(handlers, **ON | more, retry_policy=RetryPolicy(10, [0.1], 0.0))
    bus.send_many("orders", [NewCommand("ship", n) for n in range(200)])
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") > 50, 30)
    is_down.set()
    bus.send_many("orders", [NewCommand("ship", n) for n in range(200, 600)])
    until(lambda: "OPEN" in moves(db), 40, what=lambda: bus.breakers())
    until(lambda: one(db, "SELECT count(*) FROM commandbus.parked") > 100, 30)
    is_down.clear()
    until_settled(db, 40)
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 600
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert [info.state for info in bus.breakers()] == ["CLOSED"]


def test_very_many_parked_commands_delay_no_lease(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """More than a bite: a probe closes the breaker, the rest is woken bite by bite, and a lease is renewed."""
    begun = threading.Event()

    @handlers.handler("orders", "slow", timeout=60)
    def slow(ctx: Any) -> None:
        begun.set()
        go_on.wait(60)

    handlers.register("orders", "ship", lambda ctx: None)
    bus.send_many("orders", [NewCommand("ship") for _ in range(3500)])
    bus.open_breaker("orders", "ship", operator="ann")
    start_worker(handlers, visibility_timeout=1.5, statement_timeout=1.0)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.parked") == 3500, 60)
    bus.send("orders", "slow", command_id="slow")
    assert begun.wait(60)
    db.execute("UPDATE commandbus.breaker SET is_forced = false, until = now()")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 3500, 60)
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert one(db, "SELECT read_ct FROM pgmq.q_orders__commands") == 1, "the lease was never lost"
    go_on.set()
    until_settled(db)
    assert moves(db) == ["HALF_OPEN", "CLOSE"]
