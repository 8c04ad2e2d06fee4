"""Workers carry out plans: at once when told, at the plan's pace, until somebody stops them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, NewCommand, PermanentCommandError, PlanState, Worker
from support.waiting import one, until

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


@pytest.fixture
def is_mended() -> threading.Event:
    return threading.Event()


@pytest.fixture
def worker(handlers: HandlerRegistry, start_worker: StartWorker, is_mended: threading.Event) -> Worker:
    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        if not is_mended.is_set():
            raise PermanentCommandError("no", code="BROKEN")

    return start_worker(handlers)


def troubled(bus: CommandBus, count: int) -> None:
    bus.send_many("orders", [NewCommand("ship", {"n": n}, command_id=f"c{n}") for n in range(count)])
    until(lambda: bus.status("orders")[0].in_tsq == count)


def test_a_worker_carries_out_a_plan_without_anybody_looking(
    bus: CommandBus, worker: Worker, is_mended: threading.Event, db: Db
) -> None:
    troubled(bus, 30)
    is_mended.set()
    plan = bus.plans.preview("orders", "retry", operator="ann")
    bus.plans.start(plan.id, operator="ann")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 30)
    done = until(lambda: found if (found := bus.plans.get(plan.id)).state.is_final else None)
    assert (done.state, done.moved, done.skipped) == (PlanState.DONE, 30, 0)


def test_one_locked_command_holds_up_no_other_one(
    bus: CommandBus, worker: Worker, is_mended: threading.Event, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    troubled(bus, 50)
    is_mended.set()
    caplog.clear()
    plan = bus.plans.preview("orders", "retry", operator="ann")
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM commandbus.tsq ORDER BY command LIMIT 1 FOR UPDATE")
        bus.plans.start(plan.id, operator="ann")
        until(lambda: bus.plans.get(plan.id).moved == 49)
        assert bus.plans.get(plan.id).locked == 1
        until(lambda: bus.status("orders")[0].in_tsq == 1)
    done = until(lambda: found if (found := bus.plans.get(plan.id)).state.is_final else None)
    assert (done.state, done.moved, done.skipped, done.locked) == (PlanState.DONE, 50, 0, 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_lock_that_another_duty_waits_for_holds_up_no_plan(
    bus: CommandBus, worker: Worker, is_mended: threading.Event, database: str, db: Db
) -> None:
    """The maintenance thread ends expired commands before it carries out plans."""
    troubled(bus, 3)
    is_mended.set()
    bus.send("orders", "ship", command_id="late", delay="1h")
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE commandbus.parked IN SHARE MODE")
        db.execute("UPDATE commandbus.command SET expires_at = now() - interval '1 ms' WHERE command_id = 'late'")
        plan = bus.plans.preview("orders", "retry")
        until(lambda: one(db, "SELECT count(*) FROM pg_locks WHERE NOT granted"))
        bus.plans.start(plan.id)
        until(lambda: bus.plans.get(plan.id).state is PlanState.DONE)


def test_a_paced_plan_goes_on_step_by_step_and_stops(bus: CommandBus, worker: Worker, db: Db) -> None:
    """Retried commands fail again at once; the plan does not take them a second time."""
    troubled(bus, 40)
    plan = bus.plans.preview("orders", "retry", over="20s")
    bus.plans.start(plan.id)
    seen = until(lambda: found if (found := bus.plans.get(plan.id)).moved >= 3 else None)
    assert seen.moved < 30
    stopped = bus.plans.stop(plan.id, operator="ann", reason="no better")
    assert stopped.moved + stopped.left == 40
    until(lambda: bus.status("orders")[0].in_tsq == 40)
    assert bus.plans.get(plan.id) == stopped
    acted = db.execute("SELECT count(*), count(DISTINCT command) FROM commandbus.operator_action").fetchone()
    assert acted == (stopped.moved, stopped.moved)
