"""A worker that an operator has paused: it claims nothing more, finishes what runs, and goes on when resumed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from commandbus import (
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    InvalidOperationError,
    Limit,
    NewCommand,
    Worker,
    WorkerInfo,
)
from commandbus.web.health_router import readiness
from support.waiting import one, until, until_settled
from worker.conftest import StartWorker

Db = psycopg.Connection[Any]
WAIT = 30


def registry(did: list[str], go_on: threading.Event) -> tuple[HandlerRegistry, threading.Event]:
    """Handlers that note what they did; `hold` waits to go on. The event says that it has begun."""
    handlers, begun = HandlerRegistry(), threading.Event()

    @handlers.handler("orders", "quick")
    def quick(command: Any, _ctx: Any) -> None:
        did.append(command.command_id)

    @handlers.handler("orders", "hold", timeout=60)
    def hold(command: Any, _ctx: Any) -> None:
        begun.set()
        go_on.wait()
        did.append(command.command_id)

    @handlers.handler("orders", "alike", chunk=10, chunk_wait="60s")
    def alike(commands: list[Any], _ctx: Any) -> None:
        did.extend(command.command_id for command in commands)

    return handlers, begun


def known(bus: CommandBus, worker: Worker) -> Worker:
    """The worker, as soon as it is in the registry."""
    until(lambda: worker.id in [item.id for item in bus.workers()])
    return worker


def shown(bus: CommandBus, worker: Worker) -> WorkerInfo:
    (found,) = [item for item in bus.workers() if item.id == worker.id]
    return found


def test_it_claims_nothing_more_finishes_what_runs_and_others_go_on(
    bus: CommandBus, db: Db, go_on: threading.Event, start_worker: StartWorker
) -> None:
    first, second = list[str](), list[str]()
    handlers, begun = registry(first, go_on)
    paused = known(bus, start_worker(handlers, concurrency=3, visibility_timeout=2.0, statement_timeout=1.0))
    bus.send("orders", "hold", command_id="running")
    assert begun.wait(WAIT)

    assert bus.pause_worker(paused.id, wait=WAIT, operator="ann", reason="odd disk")
    info = shown(bus, paused)
    assert (info.state, paused.state) == ("PAUSED", "PAUSED"), "at once: it was written before the answer"
    assert info.health is not None
    assert str(info.health["state"]) == "degraded"
    assert "paused by ann: odd disk" in str(info.health["reasons"])
    assert not bus.pause_worker(paused.id, wait=WAIT, operator="bob"), "it was paused already"

    start_worker(registry(second, go_on)[0], concurrency=3)
    bus.send_many("orders", [NewCommand("quick", command_id=f"q{n}") for n in range(30)])
    until(lambda: len(second) == 30)
    assert first == []

    # What runs keeps its lease: it is renewed beyond its first end, and nobody else has claimed it.
    lease = "SELECT vt FROM pgmq.q_orders__commands WHERE headers ->> 'held_by' = %s AND read_ct = 1"
    vt = one(db, lease, paused.id)
    until(lambda: one(db, lease, paused.id) > vt + timedelta(seconds=2))
    beat = info.heartbeat_at
    until(lambda: shown(bus, paused).heartbeat_at > beat)
    go_on.set()
    until_settled(db)
    assert first == ["running"]
    assert bus.get_command("orders", "running").attempts == 1  # type: ignore[union-attr]

    recorded = "SELECT string_agg(action || ' ' || operator, ', ' ORDER BY id) FROM commandbus.control_action"
    assert one(db, f"{recorded} WHERE subject = %s", f"worker orders/{paused.id}") == "PAUSE ann, PAUSE bob"


def test_it_goes_on_when_it_is_resumed(
    bus: CommandBus, db: Db, go_on: threading.Event, start_worker: StartWorker
) -> None:
    did: list[str] = []
    worker = known(bus, start_worker(registry(did, go_on)[0], concurrency=2))
    assert not bus.resume_worker(worker.id, wait=WAIT), "it was not paused"
    bus.pause_worker(worker.id, wait=WAIT, operator="ann")
    bus.send_many("orders", [NewCommand("quick", command_id=f"q{n}") for n in range(5)])
    (status,) = bus.status("orders")
    assert (status.ready, status.running) == (5, 0)
    assert bus.resume_worker(worker.id, wait=WAIT, operator="ann", reason="repaired")
    until_settled(db)
    assert sorted(did) == [f"q{n}" for n in range(5)]
    info = shown(bus, worker)
    assert (info.state, worker.state) == ("ACTIVE", "ACTIVE")
    assert "paused" not in str(info.health)


def test_what_has_not_started_is_given_back_at_once(
    bus: CommandBus, db: Db, go_on: threading.Event, start_worker: StartWorker
) -> None:
    """Three commands that wait for more of their kind."""
    did: list[str] = []
    worker = known(bus, start_worker(registry(did, go_on)[0], concurrency=2))
    bus.send_many("orders", [NewCommand("alike", command_id=f"a{n}") for n in range(3)])
    held = "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'held_by'"
    until(lambda: one(db, held) == 3)
    bus.pause_worker(worker.id, wait=WAIT, operator="ann")
    until(lambda: one(db, held) == 0)
    assert "an operator has paused its worker" in str(bus.get_audit_trail("orders", "a0").items)
    assert did == []
    bus.resume_worker(worker.id, wait=WAIT)
    until(lambda: one(db, held) == 3)


def test_a_command_that_waits_for_a_permit_goes_back(
    bus: CommandBus, db: Db, go_on: threading.Event, start_worker: StartWorker
) -> None:
    handlers, begun = HandlerRegistry(), threading.Event()
    docai = Limit("docai", concurrency=1)

    @handlers.handler("orders", "ask", limits=[docai], timeout=60)
    def ask(_command: Any, _ctx: Any) -> None:
        begun.set()
        go_on.wait()

    worker = known(bus, start_worker(handlers, concurrency=3))
    bus.send_many("orders", [NewCommand("ask", command_id=f"l{n}") for n in range(3)])
    assert begun.wait(WAIT)
    bus.pause_worker(worker.id, wait=WAIT, operator="ann")
    held = "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'held_by'"
    until(lambda: one(db, held) == 1)
    go_on.set()
    until(lambda: one(db, held) == 0)
    assert len(list(bus.query_commands(status=CommandStatus.COMPLETED))) == 1
    bus.resume_worker(worker.id, wait=WAIT)
    until_settled(db)


@pytest.mark.parametrize("how", ["stop", "leave"])
def test_a_paused_worker_stops(
    bus: CommandBus, db: Db, go_on: threading.Event, start_worker: StartWorker, how: str
) -> None:
    did: list[str] = []
    handlers, begun = registry(did, go_on)
    worker = known(bus, start_worker(handlers, concurrency=2))
    bus.send("orders", "hold", command_id="running")
    assert begun.wait(WAIT)
    bus.pause_worker(worker.id, wait=WAIT, operator="ann")
    bus.send("orders", "quick", command_id="left")
    if how == "leave":
        go_on.set()
    else:
        threading.Timer(0.3, go_on.set).start()
    report = worker.stop()
    assert report.abandoned == 0
    assert did == ["running"]
    assert (shown(bus, worker).state, worker.state) == ("STOPPED", "STOPPED")
    with pytest.raises(InvalidOperationError, match="is alive"):
        bus.resume_worker(worker.id)

    start_worker(registry(did, go_on)[0], concurrency=2)
    until_settled(db)
    assert did == ["running", "left"], "the next one is not paused"


def test_it_stays_ready_because_somebody_wants_it_so(
    bus: CommandBus, go_on: threading.Event, start_worker: StartWorker
) -> None:
    """A platform must not restart a worker that a person has paused."""
    worker = known(bus, start_worker(registry([], go_on)[0]))
    bus.pause_worker(worker.id, wait=WAIT, operator="ann", reason="look at it")
    document = readiness(worker)
    assert document["status"] == "degraded"
    assert document["state"] == "PAUSED"
    assert any("paused by ann: look at it" in reason for reason in document["reasons"])


def test_many_operators_at_once_leave_it_in_one_of_both_states(
    bus: CommandBus, db: Db, go_on: threading.Event, start_worker: StartWorker
) -> None:
    did: list[str] = []
    worker = known(bus, start_worker(registry(did, go_on)[0], concurrency=2))
    wishes: list[Callable[..., bool]] = [bus.pause_worker, bus.resume_worker] * 8
    with ThreadPoolExecutor(8) as pool:
        sends = pool.submit(bus.send_many, "orders", [NewCommand("quick") for _ in range(200)])
        answers = list(pool.map(lambda wish: wish(worker.id, wait=WAIT, operator="ann"), wishes))
        sends.result()
    changed = [wish for wish, has_changed in zip(wishes, answers, strict=True) if has_changed]
    pauses = sum(wish == bus.pause_worker for wish in changed)
    assert 0 <= pauses - (len(changed) - pauses) <= 1, "pauses and resumes alternate"
    assert shown(bus, worker).state == worker.state == ("PAUSED" if 2 * pauses > len(changed) else "ACTIVE")
    bus.resume_worker(worker.id, wait=WAIT)
    until_settled(db)
    assert len(did) == 200
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 200


def test_who_is_not_there_or_drains_says_so(
    bus: CommandBus, go_on: threading.Event, start_worker: StartWorker
) -> None:
    with pytest.raises(InvalidOperationError, match="no worker 'nobody' is alive: `commandbus workers`"):
        bus.pause_worker("nobody")
    handlers, begun = registry([], go_on)
    worker = known(bus, start_worker(handlers))
    bus.send("orders", "hold", command_id="running")
    assert begun.wait(WAIT)
    runtime = worker._runtime
    assert runtime is not None
    bus.pause_worker(worker.id, wait=WAIT, operator="ann")
    runtime.drain("the test wants it")
    assert worker.state == "DRAINING"
    for wish in (bus.pause_worker, bus.resume_worker):
        with pytest.raises(InvalidOperationError, match="it is draining, and claims nothing more"):
            wish(worker.id, wait=WAIT)
    go_on.set()
    until(lambda: worker.running == 0)
