"""Commands in lines beside the rest: pauses, breakers, permits, expiry, prune, transactions, poolers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, RetryPolicy, TransientCommandError, Worker
from commandbus.flow.keys.release import LineKey, end_overrides, ended, find_new, release
from support.waiting import one, until, until_settled
from support.workers import quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
SERIAL = Limit("account", concurrency=1, key="data.account", ordered=True)


def book(numbers: range, **options: Any) -> list[NewCommand]:
    return [NewCommand("book", {"account": 1, "n": n}, **options) for n in numbers]


def keep_order(handlers: HandlerRegistry, *limits: Limit) -> list[int]:
    ran: list[int] = []
    handlers.register(
        "orders", "book", lambda command, ctx: ran.append(command.data["n"]), limits=[SERIAL, *limits]
    )
    return ran


def test_a_pause_parks_the_first_and_a_resume_goes_on_in_order(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    ran = keep_order(handlers)
    start_worker(handlers)
    bus.pause("orders", "book", operator="ada")
    bus.send_many("orders", book(range(5)))
    until(lambda: one(db, "SELECT count(*) FROM commandbus.parked") == 1)
    assert one(db, "SELECT count(*) FROM commandbus.keyed WHERE state = 'RELEASED'") == 1
    bus.resume("orders", "book", operator="ada")
    until_settled(db)
    assert ran == list(range(5))


def test_permits_and_retries_keep_the_place(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """Two lines share one permit, and each second attempt fails at first."""
    ran: dict[int, list[int]] = {1: [], 2: []}
    failed: set[tuple[int, int]] = set()

    @handlers.handler("orders", "book", limits=[SERIAL, Limit("api", concurrency=1, store="postgres")])
    def book_it(command: Any, ctx: Any) -> None:
        account, n = command.data["account"], command.data["n"]
        if n % 2 and (account, n) not in failed:
            failed.add((account, n))
            raise TransientCommandError("again")
        ran[account].append(n)

    start_worker(handlers, retry_policy=RetryPolicy(backoff_schedule=[0.01], max_attempts=5))
    bus.send_many("orders", [NewCommand("book", {"account": key, "n": n}) for n in range(6) for key in (1, 2)])
    until_settled(db)
    assert ran == {1: list(range(6)), 2: list(range(6))}


def test_what_expires_leaves_its_line_and_what_is_pruned_is_forgotten(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    ran = keep_order(handlers)
    start_worker(handlers)
    bus.key_limits.override("orders", "account", "1", concurrency=0, until="1h")
    bus.send_many("orders", [*book(range(2), expires=0.05), *book(range(2, 4))])
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'PENDING'") == 2)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.keyed") == 2)
    bus.key_limits.override("orders", "account", None, concurrency=1, until="1h")
    bus.key_limits.override(
        "orders", "account", "1", concurrency=1, until=0.05
    )  # over soon: then all keys' one holds
    until_settled(db)
    assert ran == [2, 3]
    until(
        lambda: one(db, "SELECT count(*) FROM commandbus.key_override") == 1,
        what="the one that is over is removed",
    )


def test_a_send_for_later_joins_its_line_when_its_time_has_come(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    ran = keep_order(handlers)
    start_worker(handlers)
    bus.key_limits.override("orders", "account", "1", concurrency=0, until="1h")
    bus.send("orders", "book", {"account": 1, "n": 0}, delay=0.2)
    bus.send("orders", "book", {"n": 1}, key="1", delay=0.1)
    bus.send_many("orders", book(range(2, 4)))
    assert one(db, "SELECT count(*) FROM commandbus.keyed") == 2
    until(lambda: one(db, "SELECT count(*) FROM commandbus.keyed") == 4)
    bus.key_limits.override("orders", "account", "1", concurrency=1, until="1h")
    until_settled(db)
    assert ran == [0, 1, 2, 3], "by their numbers, as soon as they are in line"


def test_a_sender_that_rolls_back_leaves_nothing(
    bus: CommandBus, database: str, db: Db, handlers: HandlerRegistry
) -> None:
    keep_order(handlers)
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    with psycopg.connect(database) as conn:
        bus.send_many("orders", book(range(3)), conn=conn)
        bus.create_batch("orders", book(range(3)), conn=conn)
        assert one(conn, "SELECT count(*) FROM commandbus.keyed") == 6
        conn.rollback()
    assert one(db, "SELECT count(*) FROM commandbus.keyed") == 0


def test_a_worker_behind_a_transaction_pooler(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """It can neither listen nor prepare."""
    ran = keep_order(handlers)
    start_worker(handlers, prepared_statements=False)
    bus.send_many("orders", book(range(10)))
    until_settled(db)
    assert ran == list(range(10))


def test_until_idle_runs_what_handlers_send_and_what_joins_at_the_claim(
    bus: CommandBus, database: str, db: Db, handlers: HandlerRegistry
) -> None:
    ran = keep_order(handlers)
    handlers.register("orders", "start", lambda command, ctx: bus.send_many("orders", book(range(3))))
    bus.send_many("orders", book(range(10, 13)))  # before there is a rule
    bus.send("orders", "start")
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    assert sorted(ran) == [0, 1, 2, 10, 11, 12]
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status <> 'COMPLETED'") == 0


def test_what_joins_a_line_after_the_look_for_key_limits_is_waited_for(start_worker: StartWorker) -> None:
    """A worker that ends when it is idle had looked before there was a key limit: it must look once more."""
    others = HandlerRegistry()
    others.register("orders", "note", lambda command, ctx: None)
    worker = start_worker(others)
    releasing = worker._runtime._key_releasing  # type: ignore[union-attr]
    until(lambda: not releasing.is_busy)
    releasing.joined()
    assert releasing.is_busy
    until(lambda: not releasing.is_busy)


def test_a_place_that_nobody_freed_is_found(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """As after a kill between the settlement and the release."""
    bus.key_limits.set("orders", "account", ordered=True)
    sent = bus.send_many("orders", book(range(3), key="1", key_limit="account"))
    (new,) = bus.run(find_new("orders"))
    assert new.commands == [sent[0].id], "of one send, the first of a key is enough"
    assert bus.run(release("orders", [], [new])).commands == 1
    assert bus.run(ended("orders", None)).keys == set()
    bus.cancel("orders", sent[0].command_id)
    assert bus.run(ended("orders", None)) == (None, {LineKey("account", "1")})
    assert bus.run(find_new("orders")) == []
    assert bus.run(end_overrides(["orders"])) == {}
    ran = keep_order(handlers)
    start_worker(handlers)
    until_settled(db)
    assert ran == [1, 2]


def test_priorities_stay_with_commands_in_line(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """A line goes by numbers; between lines, high goes before low."""
    ran = keep_order(handlers)
    start_worker(handlers)
    bus.key_limits.override("orders", "account", None, concurrency=0, until="1h")
    sent = [
        bus.send("orders", "book", {"account": 1, "n": n}, priority=priority)
        for n, priority in enumerate(("low", "high", "normal"))
    ]
    for receipt in sent:
        record = bus.get_command("orders", receipt.command_id)
        assert record is not None
        assert (record.waiting_for, record.visible_at) == ("key", None)
    bus.key_limits.override("orders", "account", "1", concurrency=1, until="1h")
    until_settled(db)
    assert ran == [0, 1, 2]
