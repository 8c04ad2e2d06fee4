"""A supervised fleet as people watch it: slots of several workers, one that is recycled, one that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, NewCommand, Settings
from commandbus.web.app import create_console
from support.consoles import served
from support.supervised import Supervised, on_host
from support.waiting import one, until
from web.conftest import Visit

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


@pytest.mark.slow
def test_one_of_two_processes_is_paused_and_dies_so(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    """A pause is the worker's own: others go on, health says it, a drain ends it, a replacement is not paused."""
    supervised = supervise(processes=2, concurrency=1, visibility_timeout="30s").until_ready(2)
    bus.send("orders", "hold", command_id="a")
    where = until(lambda: (found := slots(bus)) and len(found) == 1 and found)
    (idle,) = [item.id for item in bus.workers() if item.state == "ACTIVE" and item.id != where["a"]]
    for worker in (where["a"], idle):
        assert bus.pause_worker(worker, wait=20, operator="ann", reason="odd host")
    bus.send_many("orders", [NewCommand("quick", command_id=f"q{n}") for n in range(10)])
    status, document = until(
        lambda: (found := supervised.ask("/health/ready"))[1] and len(found[1]["reasons"]) == 2 and found
    )
    assert (status, document["status"]) == (200, "degraded"), "a platform must not restart it"
    assert all("paused by ann: odd host" in reason for reason in document["reasons"])
    assert {shown["state"] for shown in document["workers"]} == {"PAUSED"}
    scraped = supervised.ask("/metrics")[1]
    assert 'commandbus_workers{state="paused"} 2' in scraped
    assert 'commandbus_workers{state="active"} 0' in scraped
    (domain,) = bus.status("orders")
    assert (domain.ready, domain.running) == (10, 1), "nobody claims, and what runs goes on"

    bus.resume_worker(idle, wait=20, operator="ann")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 10)
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0, "no attempt was lost or given back"

    pid = one(db, "SELECT pid FROM commandbus.worker WHERE id = %s", where["a"])
    os.kill(pid, signal.SIGKILL)
    supervised.until_said("is ready (process", times=3)
    (tasks / "go").touch()
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 11)
    live = until(
        lambda: (
            (found := [item for item in bus.workers() if item.is_alive and item.state == "ACTIVE"])[1:] and found
        )
    )
    assert where["a"] not in [item.id for item in live], "the replacement is not paused"

    bus.pause_worker(idle, wait=20, operator="ann")
    bus.recycle_worker(idle, wait=20, operator="ann")
    until(lambda: [item for item in bus.workers() if item.id == idle and item.state == "STOPPED"])
    supervised.until_said("is ready (process", times=4)
    code, _ = supervised.stop()
    assert code == 0


@pytest.mark.slow
def test_a_fleet_on_two_machines(supervise: Supervise, tasks: Path, bus: CommandBus, database: str) -> None:
    """Each has its name and its part of the pages; a question and a recycling find their machine."""
    if subprocess.run([*on_host("machine-a"), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not name a machine (unshare --uts)")
    for host in ("machine-a", "machine-b"):
        supervise(host=host, processes=1, concurrency=1, visibility_timeout="30s").until_ready()
    for name in ("a", "b"):
        bus.send("orders", "hold", command_id=name)
    where = until(lambda: (found := slots(bus)) and len(found) == 2 and found)
    hosts = {item.id: item.host for item in bus.workers()}
    assert {hosts[worker] for worker in where.values()} == {"machine-a", "machine-b"}
    with served(create_console(Settings(database_url=database))) as port:
        visit = Visit(port)
        strips = re.findall(r'<section class="strip"><h3>.*?</section>', visit.get("/").text, re.DOTALL)
        assert len(strips) == 2
        for command, worker in where.items():
            (strip,) = [text for text in strips if worker in text]
            assert hosts[worker] in strip
            assert f"id={command}" in strip
        groups = re.findall(r'<section class="supervisor">.*?</section>', visit.get("/workers").text, re.DOTALL)
        assert [hosts[worker] in group for worker in where.values() for group in groups if worker in group] == [
            True
        ] * 2
        for command, worker in where.items():
            stack = visit.get("/api/stack", domain="orders", id=command, wait=10).json
            assert stack["worker"] == worker
            assert "hold" in str(stack)
        assert visit.act("recycle-worker", "/workers", worker=where["a"], reason="leaks").status == 200
        until(lambda: [item for item in bus.workers() if item.id == where["a"] and item.state == "DRAINING"])
        (after,) = [item for item in bus.workers() if item.id == where["b"]]
        assert after.state == "ACTIVE"
    (tasks / "go").touch()
    until(lambda: [item for item in bus.workers() if item.id == where["a"] and item.state == "STOPPED"])
    (other,) = until(
        lambda: [item for item in bus.workers() if item.state == "ACTIVE" and item.id not in where.values()]
    )
    assert other.host == hosts[where["a"]], "its own machine has replaced it"
