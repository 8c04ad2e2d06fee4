"""Nothing is started whose lease may have run out: in every lane, and after every wait before the start.

A worker that was stopped, or whose machine was suspended, wakes up with commands that it claimed long ago. Here
commands are delivered to a running worker as if they had been claimed then. For real signals see `tests/faults`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Limit, Worker
from commandbus.clock import boottime
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.worker.dispatcher import Dispatcher
from commandbus.worker.isolation.child_pool import Children
from commandbus.worker.runtime import WorkerRuntime
from support.isolated_handlers import handlers as isolated
from support.waiting import one, until, until_settled, verdicts
from support.workers import add, short_lease

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
LONG_AGO = 100.0


@pytest.fixture
def runs() -> list[tuple[str, int]]:
    """(command_id, attempt number) of every start."""
    return []


@pytest.fixture
def recording(handlers: HandlerRegistry, lane: str, runs: list[tuple[str, int]]) -> HandlerRegistry:
    async def work(command: Any, ctx: Any) -> None:
        runs.append((command.command_id, ctx.attempt_number))

    add(handlers, lane, "work", work)
    return handlers


def claimed_by(
    worker: Worker, bus: CommandBus, db: Db, *names: str, command_type: str = "work"
) -> list[tuple[Any, ...]]:
    """Rows of new commands, claimed under this worker's name and not delivered yet."""
    with db.transaction():  # its own claimer does not see them before
        for name in names:
            bus.send("orders", command_type, command_id=name, conn=db)
        db.execute("UPDATE pgmq.q_orders__commands SET vt = now()")  # they were sent after now()
        found = bus.run(claim(domain="orders", worker=worker.id, n=10, lease_seconds=60, cursor=None), db)
    assert len(found.ready) == len(names)
    return list(found.ready)


def runtime_of(worker: Worker) -> WorkerRuntime:
    assert worker._runtime is not None
    return worker._runtime


def test_an_old_claim_is_given_back_uncharged_and_claimed_anew(
    bus: CommandBus, db: Db, recording: HandlerRegistry, start_worker: StartWorker, runs: list[tuple[str, int]]
) -> None:
    worker = start_worker(recording)
    rows = claimed_by(worker, bus, db, "a", "b")
    runtime_of(worker).dispatcher.deliver("orders", rows, boottime() - LONG_AGO)
    until_settled(db)
    assert sorted(runs) == [("a", 2), ("b", 2)]
    assert verdicts(db, "a") == [(1, "GIVEN_BACK")]
    assert one(db, "SELECT array_agg(waived) FROM commandbus.command") == [1, 1]


def test_a_fresh_claim_is_started(
    bus: CommandBus, db: Db, recording: HandlerRegistry, start_worker: StartWorker, runs: list[tuple[str, int]]
) -> None:
    worker = start_worker(recording)
    rows = claimed_by(worker, bus, db, "a")
    runtime_of(worker).dispatcher.deliver("orders", rows, boottime())
    until_settled(db)
    assert runs == [("a", 1)]


def test_an_old_claim_is_not_started_in_a_process_of_its_own(
    bus: CommandBus, db: Db, start_worker: StartWorker
) -> None:
    worker = start_worker(isolated, concurrency=2)
    rows = claimed_by(worker, bus, db, "c", command_type="echo")
    runtime_of(worker).dispatcher.deliver("orders", rows, boottime() - LONG_AGO)
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.result["attempt"], found.attempts) == (1, 2)
    assert verdicts(db, "c") == [(1, "GIVEN_BACK")]


def test_a_lease_that_runs_out_in_the_wait_for_a_process_is_not_started(
    bus: CommandBus, db: Db, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes back, too, and runs the next attempt."""
    take, taken = Children.take, []

    def take_long(children: Children, is_wanted: Callable[[], bool]) -> Any:
        process = take(children, is_wanted)
        taken.append(process)
        if len(taken) == 1:
            for attempt in list(runtime_of(worker).attempts.held):
                attempt.renewed_at -= LONG_AGO
        return process

    monkeypatch.setattr(Children, "take", take_long)
    worker = start_worker(isolated, concurrency=1)
    bus.send("orders", "echo", command_id="c")
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert (found.result["attempt"], found.attempts) == (1, 2)
    assert verdicts(db, "c") == [(1, "GIVEN_BACK")]
    assert [process.pid for process in taken] == [found.result["pid"]] * 2


def test_what_somebody_else_has_completed_meanwhile_is_not_started(
    bus: CommandBus, db: Db, recording: HandlerRegistry, start_worker: StartWorker, runs: list[tuple[str, int]]
) -> None:
    worker = start_worker(recording)
    rows = claimed_by(worker, bus, db, "c")
    db.execute("DELETE FROM pgmq.q_orders__commands")
    db.execute("UPDATE commandbus.command SET status = 'COMPLETED', attempt = 2, finished_at = now()")
    runtime = runtime_of(worker)
    runtime.dispatcher.deliver("orders", rows, boottime() - LONG_AGO)
    until(lambda: not runtime.attempts.held)
    assert runs == []
    assert verdicts(db, "c") == []


def test_what_is_known_to_be_lost_is_dropped(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits behind a slow one. The keeper hears that it is lost, so it is neither started nor settled."""
    monkeypatch.setattr("commandbus.worker.dispatcher.STALE_SECONDS", 60.0)
    runs: list[str] = []

    @handlers.handler("orders", "work", timeout=60)
    def work(command: Any, ctx: Any) -> None:
        runs.append(command.command_id)
        go_on.wait(20)

    worker = start_worker(handlers, concurrency=1, **short_lease())
    runtime = runtime_of(worker)
    first, second = claimed_by(worker, bus, db, "a", "b")
    runtime.dispatcher.deliver("orders", [first], boottime())
    until(lambda: runs)
    db.execute(
        "UPDATE pgmq.q_orders__commands SET headers = jsonb_build_object('held_by', 'thief', 'since', now()) "
        "WHERE msg_id = %s",
        (second[0],),
    )
    runtime.dispatcher.deliver("orders", [second], boottime())
    until(lambda: any(attempt.is_lost for attempt in list(runtime.attempts.held)))
    go_on.set()
    until(lambda: not runtime.attempts.held)
    assert runs == ["a"]
    assert verdicts(db, "b") == []
    assert one(db, "SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands") == "thief"


def test_a_suspect_that_is_lost_before_it_starts_keeps_no_other_waiting(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Suspects run one at a time. It was to be that one, and is somebody else's by now."""
    monkeypatch.setattr("commandbus.worker.dispatcher.STALE_SECONDS", 60.0)
    runs: list[str] = []

    @handlers.handler("orders", "work", timeout=60)
    def work(command: Any, ctx: Any) -> None:
        runs.append(command.command_id)
        go_on.wait(20)

    worker = start_worker(handlers, concurrency=1, **short_lease())
    runtime = runtime_of(worker)
    first, second = claimed_by(worker, bus, db, "a", "b")
    runtime.dispatcher.deliver("orders", [first], boottime())
    until(lambda: runs)
    db.execute(
        "UPDATE pgmq.q_orders__commands SET headers = jsonb_build_object('held_by', 'thief', 'since', now()), "
        "vt = now() + interval '1 h' WHERE msg_id = %s",
        (second[0],),
    )
    runtime.dispatcher.deliver("orders", [tuple(ClaimedRow(*second)._replace(suspect=1, alone=True))], boottime())
    until(lambda: len(runtime.attempts.held) == 1, what="it is given up before it is its turn in a slot")
    go_on.set()
    until(lambda: not runtime.attempts.held)
    assert runs == ["a"]
    with db.transaction():
        bus.send("orders", "work", command_id="c", conn=db)
        db.execute("UPDATE commandbus.command SET suspect = 1, waived = 0, alone = true WHERE command_id = 'c'")
    until(lambda: "c" in runs, what=lambda: verdicts(db, "c"))


def test_an_old_permit_of_a_limit_is_asked_for_again(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the grant and the start the process may be stopped, and the permit may be somebody else's."""
    asked: list[str] = []
    ran: list[str] = []

    @handlers.handler("orders", "work", limits=[Limit("docai", concurrency=1)])
    def work(command: Any, ctx: Any) -> None:
        ran.append(command.command_id)

    push = Dispatcher.push

    def push_late(dispatcher: Dispatcher, attempt: Any) -> None:
        asked.append(attempt.command_id)
        if len(asked) == 1:
            for permit in attempt.limit_use.permits:
                permit.renewed_at -= LONG_AGO
        push(dispatcher, attempt)

    monkeypatch.setattr(Dispatcher, "push", push_late)
    start_worker(handlers)
    bus.send("orders", "work", command_id="c")
    until_settled(db)
    assert (asked, ran) == (["c", "c"], ["c"])


def look_once(runtime: WorkerRuntime) -> None:
    """Wait until the claimer has looked for room twice: the second look began after this call."""
    for _ in range(2):
        before = runtime._claimer._asked_at
        until(lambda: runtime._claimer._asked_at != before)  # noqa: B023 - used at once


def test_the_wait_for_a_permit_is_no_wait_for_a_slot(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command that was long at its limit, and has just got a permit, is not taken for one that waits for slow
    handlers."""
    monkeypatch.setattr("commandbus.worker.dispatcher.STALE_SECONDS", 10.0)
    monkeypatch.setattr("commandbus.worker.dispatcher.STALE_LOOKS", 1)
    bus.declare_limit(Limit("docai", concurrency=1))
    began = threading.Event()

    @handlers.handler("orders", "work", timeout=60)
    def work(command: Any, ctx: Any) -> None:
        began.set()
        go_on.wait(20)

    handlers.register("orders", "page", lambda ctx: None, limits=["docai"])
    worker = start_worker(handlers, concurrency=1, visibility_timeout=120.0)  # it is not renewed so soon
    runtime = runtime_of(worker)
    (row,) = claimed_by(worker, bus, db, "c", command_type="page")
    bus.send("orders", "work", command_id="slow")
    assert began.wait(60)
    runtime.dispatcher.deliver("orders", [row], boottime() - 15.0)
    until(lambda: runtime.dispatcher._slots.waiting)
    look_once(runtime)
    go_on.set()
    until_settled(db)
    assert verdicts(db, "c") == []


def test_one_look_does_not_tell_that_the_slots_are_busy(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that had no processor for a while gives nothing back that it can start now."""
    monkeypatch.setattr("commandbus.worker.dispatcher.STALE_LOOKS", 1000)
    began = threading.Event()

    @handlers.handler("orders", "work", timeout=60)
    def work(command: Any, ctx: Any) -> None:
        began.set()
        go_on.wait(20)

    worker = start_worker(handlers, concurrency=1, visibility_timeout=120.0)  # it is not renewed so soon
    runtime = runtime_of(worker)
    (row,) = claimed_by(worker, bus, db, "c")
    bus.send("orders", "work", command_id="slow")
    assert began.wait(60)
    runtime.dispatcher.deliver("orders", [row], boottime() - 5.0)
    look_once(runtime)
    assert len(runtime.dispatcher._slots.waiting) == 1
    monkeypatch.setattr("commandbus.worker.dispatcher.STALE_LOOKS", 3)
    until(lambda: verdicts(db, "c") == [(1, "GIVEN_BACK")])
    (told,) = bus.get_attempts("orders", "c")
    assert told.error == "given back before it had started: the slots of its worker are busy"
    go_on.set()
