"""Workers killed in the middle of a plan: the others go on, and no command is acted on twice or forgotten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, PlanState
from support.waiting import one, until

pytestmark = [pytest.mark.slow, pytest.mark.shared_setup]
Db = psycopg.Connection[Any]
Process = subprocess.Popen[bytes]
COUNT = 3000
PROGRAM = """
import sys; sys.path[:0] = {paths!r}
from commandbus import HandlerRegistry, Worker
from support.workers import quick_settings
import commandbus.worker.plan_runner as runner
from functools import partial
runner.carry_out = partial(runner.carry_out, bite=7)  # many portions, so that kills hit them
handlers = HandlerRegistry()
handlers.register("orders", "other", lambda command, ctx: None)
Worker(handlers, settings=quick_settings({url!r})).run()
"""
TROUBLED = """
WITH sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, data, status, attempt)
    SELECT 'orders', 'c' || n, 'ship', n, '{}', 'IN_TROUBLESHOOTING_QUEUE', 1 FROM generate_series(1, %s) n
    RETURNING id)
INSERT INTO commandbus.tsq (command, domain, command_type, attempt, error_code)
SELECT id, 'orders', 'ship', 1, 'BROKEN' FROM sent
"""


@pytest.fixture
def start(database: str) -> Iterator[Callable[[], Process]]:
    """Starts worker processes; none outlives the test."""
    started: list[Process] = []

    def start() -> Process:
        paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM.format(paths=paths, url=database)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_plan_survives_the_death_of_its_workers(start: Callable[[], Process], bus: CommandBus, db: Db) -> None:
    db.execute(TROUBLED, [COUNT])
    workers = [start(), start()]
    plan = bus.plans.preview("orders", "cancel", operator="ann", reason="gone")
    assert plan.total == COUNT
    bus.plans.start(plan.id)
    for share in (0.1, 0.5):
        until(lambda share=share: bus.plans.get(plan.id).progress > share, 60)
        for number, victim in enumerate(workers):
            victim.kill()
            victim.wait()
            moved = bus.plans.get(plan.id).moved
            acted = db.execute(
                "SELECT count(*), count(DISTINCT command) FROM commandbus.operator_action"
            ).fetchone()
            assert acted is not None
            assert acted[0] == acted[1] >= moved
            workers[number] = start()
    done = until(lambda: found if (found := bus.plans.get(plan.id)).state.is_final else None, 60)
    assert (done.state, done.moved, done.skipped) == (PlanState.DONE, COUNT, 0)
    assert one(db, "SELECT count(*) FROM commandbus.tsq") == 0
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'CANCELED'") == COUNT
    acted = db.execute("SELECT count(*), count(DISTINCT command) FROM commandbus.operator_action").fetchone()
    assert acted == (COUNT, COUNT)
