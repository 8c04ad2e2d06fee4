"""Commands of a type that a worker does not know: parked, and taken by a worker that knows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest

from commandbus import (
    CallTimeoutError,
    CommandBus,
    CommandInTroubleshootingError,
    CommandStatus,
    ConfigurationError,
    HandlerRegistry,
    Limit,
    NewCommand,
    RetryPolicy,
    Saga,
    TroubleshootingQueue,
    Worker,
    step,
)
from commandbus.flow.breakers.breaker import Bad, report
from commandbus.model.breaker import Breaker
from support import isolated_handlers as isolated
from support.running import examples
from support.waiting import one, statuses, until, until_settled, verdicts
from support.workers import AT_ONCE, add, quick_settings

Db = psycopg.Connection[Any]
StartWorker = Callable[..., Worker]


def record(bus: CommandBus, command_id: str) -> Any:
    (found,) = bus.query_commands(command_id=command_id).items
    return found


def knowing(*types: str, handle: Callable[..., Any] = lambda ctx: None, **options: Any) -> HandlerRegistry:
    """A registry with handlers for these types of domain orders."""
    registry = HandlerRegistry()
    for name in types:
        registry.register("orders", name, handle, **options)
    return registry


def until_parked(db: Db, count: int = 1) -> None:
    """Until so many commands wait for a handler."""
    until(lambda: one(db, "SELECT count(*) = %s FROM commandbus.parked WHERE reason = 'handler'", count))


def until_known(db: Db, name: str) -> None:
    """Until a worker has made known that it handles this type."""
    until(lambda: one(db, "SELECT count(*) > 0 FROM commandbus.worker WHERE %s = ANY (types)", name))


def until_looked(db: Db) -> None:
    """Until every running worker has had two more heartbeats: it looks at what waits more often than that."""
    for _ in range(2):
        _until_beaten(db, one(db, "SELECT now()"))


def _until_beaten(db: Db, since: datetime) -> None:
    query = "SELECT bool_and(heartbeat_at > %s OR state = 'STOPPED') FROM commandbus.worker"
    until(lambda: one(db, query, since))


def age(db: Db, seconds: float) -> None:
    """As if so much more time had passed since commands were parked, and since workers stopped."""
    db.execute("UPDATE commandbus.parked SET parked_at = parked_at - make_interval(secs => %s)", (seconds,))
    earlier = "heartbeat_at = heartbeat_at - make_interval(secs => %s)"
    db.execute(f"UPDATE commandbus.worker SET {earlier} WHERE state = 'STOPPED'".encode(), (seconds,))


def test_it_is_parked_and_not_charged_until_a_worker_that_knows_it_takes_it(
    bus: CommandBus, db: Db, start_worker: StartWorker, lane: str
) -> None:
    bus.send("orders", "ship", command_id="s")
    bus.send("orders", "pack", command_id="p")
    start_worker(knowing("pack"))
    until_parked(db)
    until(lambda: record(bus, "p").status is CommandStatus.COMPLETED)
    found = record(bus, "s")
    assert (found.status, found.waiting_for, found.charged_attempts) == (CommandStatus.PENDING, "handler", 0)
    assert found.waiting_text == (
        "no running worker handles orders/ship; after 1h without one it goes to the troubleshooting queue"
    )
    assert verdicts(db, "s") == [(1, "PARKED")]
    (attempt,) = db.execute("SELECT error_code, error FROM commandbus.attempt").fetchall()
    assert attempt == ("NO_HANDLER", "this worker has no handler for orders/ship")

    seen: list[tuple[int, int]] = []

    async def ship(command: Any, ctx: Any) -> None:
        seen.append((ctx.attempt, ctx.attempt_number))

    registry = HandlerRegistry()
    add(registry, lane, "ship", ship)
    start_worker(registry)
    until_settled(db)
    assert record(bus, "s").status is CommandStatus.COMPLETED
    assert seen == [(1, 2)]
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0


def test_old_and_new_workers_side_by_side(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    """Two that know the new type and two that do not, and a stream of commands of both types, some of them later:
    for seconds, and for two minutes with `--thorough`."""
    old = [start_worker(knowing("pack")) for _ in range(2)]
    new = [start_worker(knowing("pack", "ship")) for _ in range(2)]
    sent, ends = 0, time.monotonic() + examples(4, thorough=120)
    while time.monotonic() < ends or sent < 1200:
        delays = [0, 0, 0.3] * 10
        kinds = ["ship", "pack"] * 15
        sent += len(
            bus.send_many(
                "orders", [NewCommand(kind, {}, delay=delay) for kind, delay in zip(kinds, delays, strict=True)]
            )
        )
        until(lambda: one(db, "SELECT count(*) < 200 FROM pgmq.q_orders__commands"))
    until_settled(db)
    assert statuses(db) == {"COMPLETED": sent}
    parked = db.execute(
        "SELECT command, count(*) FROM commandbus.attempt WHERE verdict = 'PARKED' GROUP BY 1"
    ).fetchall()
    assert parked, "the old workers have met none: this test shows nothing"
    assert max(count for _, count in parked) == 1
    others = db.execute("SELECT verdict, error FROM commandbus.attempt WHERE verdict <> 'PARKED'").fetchall()
    assert others == []
    by_old = one(
        db,
        "SELECT count(*) FROM commandbus.command WHERE command_type = 'ship' AND worker = ANY (%s)",
        [worker.id for worker in old],
    )
    assert by_old == 0
    assert all(worker.settled for worker in new)
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0


def test_many_that_waited_are_taken_beside_what_comes(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    """A long line of them does not keep others waiting, and one slot is enough."""
    old = start_worker(knowing("pack"))
    bus.send_many("orders", [{"command_type": "ship", "data": {}}] * 300)
    until_parked(db, 300)
    old.stop()
    order: list[str] = []
    new = knowing("ship", "pack", handle=lambda ctx: order.append(ctx.command.command_type))
    bus.send_many("orders", [{"command_type": "pack", "data": {}}] * 50)
    start_worker(new, concurrency=1)
    until_settled(db)
    assert len(order) == 350
    assert order.index("pack") < 20
    assert order[:100].count("ship") > 20


def test_a_worker_that_knows_it_takes_it_at_once(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    """It is told, and does not wait for its next look at what is parked."""
    go_on = threading.Event()
    busy = knowing("ship", "wait", handle=lambda ctx: go_on.wait(20))
    bus.send("orders", "wait")
    knows = start_worker(busy, concurrency=1)
    until(lambda: one(db, "SELECT count(*) = 1 FROM pgmq.q_orders__commands WHERE headers ? 'held_by'"))
    start_worker(knowing("pack"))
    bus.send("orders", "ship", command_id="s")
    until_parked(db)
    found = record(bus, "s")
    until_known(db, "orders/ship")
    assert record(bus, "s").waiting_note == ("waits for a free slot: 1 running worker handles orders/ship")
    assert found.status is CommandStatus.PENDING
    go_on.set()
    until_settled(db)
    assert record(bus, "s").worker == knows.id


# --- nobody comes ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_after_the_timeout_without_a_worker_that_knows_it_a_person_is_asked(
    bus: CommandBus, db: Db, start_worker: StartWorker
) -> None:
    bus.send("orders", "ship", command_id="s")
    batch = bus.create_batch("orders", [{"command_type": "ship", "data": {}}] * 3)
    start_worker(knowing("pack"), unknown_type_timeout=600.0)
    until_parked(db, 4)
    age(db, 590)
    until_looked(db)
    assert statuses(db) == {"PENDING": 4}
    age(db, 20)
    until(lambda: statuses(db) == {"IN_TROUBLESHOOTING_QUEUE": 4})
    entry = next(item for item in TroubleshootingQueue(bus).list("orders") if item.command_id == "s")
    assert (entry.error_type, entry.error_code) == ("UnknownCommandTypeError", "UNKNOWN_COMMAND_TYPE")
    assert entry.error == (
        "no running worker has had a handler for command_type 'ship' of domain 'orders' for 10m "
        "(unknown_type_timeout)"
    )
    assert verdicts(db, "s") == [(1, "PARKED"), (2, "UNKNOWN_TYPE")]
    until(lambda: bus.get_batch("orders", batch.batch_id).in_tsq == 3)
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0

    # A person tries again before anybody knows it: it waits again, with a new clock.
    TroubleshootingQueue(bus).operator_retry("orders", "s", operator="ada")
    until_parked(db)
    assert record(bus, "s").status is CommandStatus.PENDING
    start_worker(knowing("ship"))
    until(lambda: record(bus, "s").status is CommandStatus.COMPLETED)


@pytest.mark.long
def test_the_clock_runs_only_while_no_live_worker_knows_it(
    bus: CommandBus, db: Db, start_worker: StartWorker
) -> None:
    go_on = threading.Event()
    bus.send("orders", "wait")
    knows = start_worker(knowing("ship", "wait", handle=lambda ctx: go_on.wait(30)), concurrency=1)
    until_known(db, "orders/ship")
    bus.send("orders", "ship", command_id="s")
    start_worker(knowing("pack"), unknown_type_timeout=600.0)
    until_parked(db)
    age(db, 3600)
    until_looked(db)
    assert record(bus, "s").status is CommandStatus.PENDING
    bus.pause("orders", operator="ada")  # so that it is not taken when its worker becomes free
    go_on.set()
    knows.stop()
    bus.resume("orders")
    db.execute("UPDATE commandbus.parked SET parked_at = now() - interval '2 hours'")
    (item,) = bus.status("orders")[0].unhandled
    assert item.workers == 0
    assert item.seconds < 60, "the clock began when the last worker that knew it stopped"
    assert record(bus, "s").status is CommandStatus.PENDING
    age(db, 600)
    until(lambda: record(bus, "s").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE)


def test_many_are_given_up_in_bites(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    bus.send_many("orders", [{"command_type": "ship", "data": {}}] * 700)
    start_worker(knowing("pack"))
    until_parked(db, 700)
    age(db, 3700)
    until(lambda: statuses(db) == {"IN_TROUBLESHOOTING_QUEUE": 700}, 30)


# --- together with everything else ------------------------------------------------------------------------------


def test_a_parked_one_can_be_canceled(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    bus.send("orders", "ship", command_id="s")
    batch = bus.create_batch("orders", [{"command_type": "ship", "data": {}}] * 5)
    start_worker(knowing("pack"))
    until_parked(db, 6)
    bus.cancel("orders", "s", operator="ada")
    assert record(bus, "s").status is CommandStatus.CANCELED
    bus.cancel_batch("orders", batch.batch_id, operator="ada")
    until_parked(db, 0)
    assert statuses(db) == {"CANCELED": 6}
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0


def test_a_pause_comes_first(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    """A paused type is parked for its pause; what waits for a handler already is taken over by it, too."""
    bus.send("orders", "ship", command_id="before")
    start_worker(knowing("pack"))
    until_parked(db)
    bus.pause("orders", "ship", operator="ada")
    bus.send("orders", "ship", command_id="after")
    until(lambda: record(bus, "after").waiting_for == "pause")
    age(db, 7200)
    go_on = start_worker(knowing("ship"))
    until(lambda: record(bus, "before").waiting_for == "pause")
    assert go_on.settled == 0
    bus.resume("orders", "ship")
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 2}


@pytest.mark.long
def test_nothing_is_given_up_or_taken_in_a_paused_domain(
    bus: CommandBus, db: Db, start_worker: StartWorker
) -> None:
    bus.send("orders", "ship", command_id="s")
    start_worker(knowing("pack"))
    until_parked(db)
    bus.pause("orders", operator="ada")
    age(db, 7200)
    start_worker(knowing("ship"))
    until_known(db, "orders/ship")
    until_looked(db)
    assert record(bus, "s").waiting_for == "handler"
    bus.resume("orders")
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 1}


def test_the_worker_that_does_not_know_it_does_not_judge_it(
    bus: CommandBus, db: Db, start_worker: StartWorker
) -> None:
    """Its handler allows ten attempts, the workers three: one that does not know the handler must not decide."""
    policy = RetryPolicy(max_attempts=10, backoff_schedule=[0], jitter=0)
    calls: list[int] = []

    def ship(command: Any, ctx: Any) -> None:
        calls.append(ctx.attempt)
        if ctx.attempt < 9:
            raise ValueError("not yet")

    registry = HandlerRegistry()
    registry.register("orders", "ship", ship, retry_policy=policy)
    for _ in range(3):
        start_worker(knowing("pack"), retry_policy=AT_ONCE)
    start_worker(registry, retry_policy=AT_ONCE)
    for n in range(10):
        bus.send("orders", "ship", command_id=f"s{n}")
    until_settled(db, 40)
    assert statuses(db) == {"COMPLETED": 10}
    assert sorted(calls) == sorted(list(range(1, 10)) * 10)


def test_the_permit_of_a_limit_that_is_kept_for_it_is_not_lost(
    bus: CommandBus, db: Db, start_worker: StartWorker
) -> None:
    """A command whose turn has come may be claimed by a worker that does not know it. The permit goes on with it:
    a limit of one, and ten commands in less time than one lost permit would cost."""
    limit = Limit("press", concurrency=1)
    registry = knowing("ship", limits=[limit])
    for _ in range(3):
        start_worker(knowing("pack"))
    start_worker(registry)
    bus.send_many("orders", [{"command_type": "ship", "data": {}}] * 10)
    until_settled(db, 12)
    assert statuses(db) == {"COMPLETED": 10}
    rows = db.execute("SELECT DISTINCT error_code FROM commandbus.attempt").fetchall()
    assert ("NO_HANDLER",) in rows


def test_a_call_waits_for_it(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    start_worker(knowing("pack"))
    with pytest.raises(CallTimeoutError):
        bus.call("orders", "ship", command_id="s", wait=1)
    assert record(bus, "s").waiting_for == "handler"
    start_worker(knowing("ship", handle=lambda ctx: {"shipped": True}))
    assert bus.call("orders", "ship", command_id="s", wait=20) == {"shipped": True}


def test_a_call_hears_that_it_was_given_up(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    start_worker(knowing("pack"))
    heard: list[BaseException] = []

    def call() -> None:
        try:
            bus.call("orders", "ship", command_id="s", wait=30)
        except CommandInTroubleshootingError as error:
            heard.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    until_parked(db)
    age(db, 3700)
    caller.join(30)
    assert "UNKNOWN_COMMAND_TYPE" in str(heard[0])


def test_isolated_handlers_get_it(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    start_worker(knowing("pack"))
    bus.send("orders", "echo", command_id="i")
    until_parked(db)
    start_worker(isolated.handlers)
    until(lambda: record(bus, "i").status is CommandStatus.COMPLETED, 60)


def test_a_script_takes_what_waits_before_it_ends(bus: CommandBus, database: str, db: Db) -> None:
    bus.send("orders", "ship", command_id="s")
    Worker(knowing("pack"), settings=quick_settings(database)).run(until_idle=True)
    assert record(bus, "s").waiting_for == "handler"
    Worker(knowing("ship"), settings=quick_settings(database)).run(until_idle=True)
    assert record(bus, "s").status is CommandStatus.COMPLETED


def test_a_handler_that_is_registered_later_is_made_known(
    bus: CommandBus, db: Db, start_worker: StartWorker
) -> None:
    registry = knowing("pack")
    bus.send("orders", "ship", command_id="s")
    start_worker(registry)
    until_parked(db)
    registry.register("orders", "ship", lambda ctx: None)
    until(lambda: record(bus, "s").status is CommandStatus.COMPLETED)
    until(lambda: one(db, "SELECT types = '{orders/pack,orders/ship}' FROM commandbus.worker"))


def test_processes_and_their_steps_wait_too(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    """Neither the process's own type nor those of its steps are known at first."""
    saga = Saga("order", step("reserve", "orders"), step("ship", "orders"), domain="orders")
    start_worker(knowing("pack"))
    bus.start_process(saga, {}, process_id="p")
    until_parked(db)
    (item,) = bus.status("orders")[0].unhandled
    assert item.command_type == "order"
    moves = knowing("reserve")
    moves.register_process(saga)
    start_worker(moves)
    until(lambda: [item.command_type for item in bus.status("orders")[0].unhandled] == ["ship"], 30)
    age(db, 3700)
    until(lambda: process_status(bus) == "WAITING_FOR_TSQ")
    (entry,) = TroubleshootingQueue(bus).list("orders")
    assert (entry.command_type, entry.error_code) == ("ship", "UNKNOWN_COMMAND_TYPE")
    start_worker(knowing("ship"))
    TroubleshootingQueue(bus).operator_retry("orders", entry.command_id, operator="ada")
    until(lambda: process_status(bus) == "COMPLETED")


def process_status(bus: CommandBus) -> str:
    found = bus.get_process("orders", "p")
    assert found is not None
    return str(found.status)


def test_the_probe_of_a_breaker_finds_its_worker(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    """What waited for a handler waits for the breaker when a worker that knows it comes; its probe closes it."""
    bus.send_many("orders", [{"command_type": "ship", "data": {}}] * 5)
    for _ in range(2):
        start_worker(knowing("pack"))
    until_parked(db, 5)
    opens = Breaker(stuck=1, reset=1)
    bus.run(report("orders", "ship", opens, bad=[Bad(1, is_stuck=True, text="it hangs")]))
    start_worker(knowing("ship"))
    until_settled(db, 40)
    assert statuses(db) == {"COMPLETED": 5}
    assert one(db, "SELECT state FROM commandbus.breaker") == "CLOSED"


# --- a domain that nobody handles ---------------------------------------------------------------------------


def test_a_worker_for_a_domain_without_handlers_does_not_start(bus: CommandBus, database: str) -> None:
    bus.create_domain("billing")
    bus.send("billing", "pay", command_id="b")
    worker = Worker(knowing("pack"), domains=["orders", "billing"], settings=quick_settings(database))
    with pytest.raises(ConfigurationError) as refused:
        worker.start()
    assert str(refused.value) == (
        "domain billing has no handler in this worker's registry (it has handlers for orders); register one "
        "before the worker starts, or do not name the domain"
    )
    assert not worker.is_running
    assert (record(bus, "b").status, record(bus, "b").attempts) == (CommandStatus.PENDING, 0)
