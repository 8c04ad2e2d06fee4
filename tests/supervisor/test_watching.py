"""A supervised fleet as people watch it: slots of several workers, one that is recycled, one that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus
from support.supervised import Supervised
from support.waiting import one, until

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]


def slots(bus: CommandBus) -> dict[str, str]:
    """Which command runs in which worker, as published."""
    return {slot.command_id: item.worker for item in bus.watch_slots() for slot in item.slots}


@pytest.mark.slow
def test_watched_recycled_and_killed(supervise: Supervise, tasks: Path, bus: CommandBus, db: Db) -> None:
    supervised = supervise(processes=2, concurrency=1, visibility_timeout="30s").until_ready(2)
    bus.send("orders", "hold", command_id="a")
    bus.send("orders", "hold", command_id="b")
    where = until(lambda: (found := slots(bus)) and len(found) == 2 and found)
    assert len(set(where.values())) == 2, "each worker shows its own"
    assert bus.request_stack("orders", "a", wait=20).worker == where["a"]

    bus.recycle_worker(where["a"], wait=20, operator="ann", reason="leaks")
    supervised.until_said("is ready (process", times=3)
    until(lambda: [item for item in bus.workers() if item.id == where["a"] and item.state == "DRAINING"])
    assert "recycled by ann: leaks" in supervised.log
    recorded = "SELECT operator || ' ' || reason FROM commandbus.control_action WHERE subject = %s"
    assert one(db, recorded, f"worker orders/{where['a']}") == "ann leaks"

    pid = one(db, "SELECT pid FROM commandbus.worker WHERE id = %s", where["b"])
    os.kill(pid, signal.SIGKILL)
    (found,) = until(lambda: [item for item in bus.post_mortems() if item.attempts])
    assert found.worker == where["b"]
    assert found.death.startswith("died of SIGKILL")
    (ran,) = found.attempts
    assert (ran.command_id, ran.attempt, ran.is_charged) == ("b", 1, False)
    assert "may have caused it" in (ran.text or "")

    (tasks / "go").touch()
    until(lambda: [item for item in bus.workers() if item.id == where["a"] and item.state == "STOPPED"])
    assert [item.worker for item in bus.post_mortems()] == [where["b"]], "a worker that was recycled has not died"
