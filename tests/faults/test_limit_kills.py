"""A fleet of ten worker processes and an API that allows five at once, and counts for itself who is inside."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandStatus, Limit, Settings
from commandbus.model.command import NewCommand
from support.api_stub import ApiStub, Reply, too_many
from support.redis_server import RedisServer
from support.running import examples
from support.waiting import one, until

Db = psycopg.Connection[Any]
Process = subprocess.Popen[bytes]
WORKERS = 10
PERMITS = 5
LEASE = 2.0


@pytest.fixture
def api() -> Iterator[ApiStub]:
    """The API, which sees what nobody else does: who is inside, killed clients and all."""
    with ApiStub() as api:
        yield api


@pytest.fixture(params=["postgres", "redis"])
def store(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of a fleet that keeps its permits in one back end or the other."""
    if request.param == "postgres":
        return {}
    return {"redis_url": request.getfixturevalue("redis_url"), "environment": "test"}


@pytest.fixture
def start(database: str, bus: CommandBus, store: dict[str, Any]) -> Iterator[Callable[[], Process]]:
    """Starts worker processes of `limit_worker.py`; none outlives the test."""
    started: list[Process] = []
    script = Path(__file__).with_name("limit_worker.py")
    source = Path(__file__).parents[2] / "src"
    settings = {
        "database_url": database,
        "concurrency": 4,
        "poll_interval": 0.5,
        "visibility_timeout": 3.0,
        "statement_timeout": 2.0,
        "cancel_grace": 1.0,
        "task_timeout": 60.0,
        "breakers_enabled": False,
        **store,
    }
    with CommandBus(settings=Settings(database_url=database, **store)) as other:
        other.declare_limit(Limit("docai", concurrency=PERMITS, lease=LEASE))

    def start() -> Process:
        process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(settings)],
            env=os.environ | {"PYTHONPATH": str(source)},
            stdin=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def name_of(n: int) -> str:
    """A command's id; in their order commands that are sent at once have their turn."""
    return f"c{n:04}"


def send(
    bus: CommandBus, api: ApiStub, count: int, kinds: tuple[str, ...], seconds: float | None, first: int = 0
) -> None:
    bus.send_many(
        "orders",
        [
            NewCommand(kinds[n % len(kinds)], {"n": n, "url": api.url, "seconds": seconds}, command_id=name_of(n))
            for n in range(first, first + count)
        ],
    )


def completed(db: Db) -> int:
    return int(one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'"))


def active(db: Db) -> int:
    return int(one(db, "SELECT count(*) FROM commandbus.worker WHERE state = 'ACTIVE'"))


def check_all_done(bus: CommandBus, db: Db, count: int) -> None:
    """Every command has its own result, and nothing is left behind."""
    for n in range(count):
        found = bus.get_command("orders", name_of(n))
        assert found.status is CommandStatus.COMPLETED
        assert found.result == str(n)
    (status,) = bus.status("orders")
    assert (status.parked, status.running) == (0, 0)
    assert one(db, "SELECT count(*) FROM commandbus.parked WHERE woken_at IS NULL AND domain <> ''") == 0


@pytest.mark.slow
@pytest.mark.alone  # the order in which ten processes begin is theirs only while each gets its turn of the machine
def test_ac4_ten_workers_never_make_more_than_five_calls_and_all_have_their_turn(
    bus: CommandBus, db: Db, api: ApiStub, start: Callable[[], Process]
) -> None:
    count = 200
    for _ in range(WORKERS):
        start()
    until(lambda: active(db) == WORKERS, 30)
    api.gathers = PERMITS
    send(bus, api, count, ("page",), 0.03)
    until(lambda: completed(db) == count, 60, what=lambda: f"{completed(db)} done, {api.inside} inside")
    assert api.peak == PERMITS, "five at once: no more, and no fewer"
    assert api.counted() == {str(n): 1 for n in range(count)}
    others = "SELECT command, verdict, error_code, error FROM commandbus.attempt WHERE verdict <> 'PARKED'"
    unparked = db.execute(others.encode()).fetchall()
    assert unparked == [], "each waited for its turn, and nothing else"
    check_all_done(bus, db, count)
    # First come, first served: how many positions before or after its turn did each begin?
    off = [abs(position - int(name)) for position, name in enumerate(api.began)]
    assert sum(off) / count <= PERMITS, off
    assert max(off) <= WORKERS * 4, off  # as many as ten workers may have in hand at the beginning


@pytest.mark.slow
def test_ac4_never_above_the_limit_while_holders_are_killed(
    bus: CommandBus, database: str, db: Db, api: ApiStub, start: Callable[[], Process], store: dict[str, Any]
) -> None:
    """A killed holder's call goes on at the API; its permit is free when its lease has ended, and not before."""
    count, kills, workers = 100, examples(4, thorough=10), examples(6, thorough=WORKERS)
    dice = random.Random(7)
    fleet = {process.pid: process for process in (start() for _ in range(workers))}
    until(lambda: active(db) == workers, 30)
    send(bus, api, count, ("page", "page", "block"), 0.15)
    for _ in range(kills):
        pid = until(lambda: next(iter(sorted({int(who) for who in api.callers()} & set(fleet))), 0), 30)
        process = fleet.pop(pid if dice.random() < 0.7 else dice.choice(sorted(fleet)))
        process.kill()
        process.wait()
        began = start()
        fleet[began.pid] = began
        time.sleep(dice.random())  # the moments of the kills are anybody's guess
    until(lambda: completed(db) == count, 60, what=lambda: f"{completed(db)} done, {api.inside} inside")
    assert api.peak <= PERMITS
    check_all_done(bus, db, count)
    calls = api.counted()
    assert set(calls) == {str(n) for n in range(count)}
    # Only what was under way in a killed process is done again.
    again = {name_of(int(name)) for name, times in calls.items() if times > 1}
    lost = {
        command
        for (command,) in db.execute(
            "SELECT DISTINCT c.command_id FROM commandbus.attempt a JOIN commandbus.command c ON c.id = a.command "
            "WHERE a.verdict NOT IN ('PARKED')"
        )
    }
    assert again <= lost
    assert len(again) <= kills * 4  # as many as run in a process
    with CommandBus(settings=Settings(database_url=database, **store)) as other:
        until(lambda: other.get_limit("docai").in_use == 0, 20)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_ac4_never_above_the_limit_while_redis_loses_its_data_and_holders_are_killed(
    bus: CommandBus, db: Db, api: ApiStub, start: Callable[[], Process], redis_server: RedisServer
) -> None:
    """Calls take half a lease, so those of a killed holder are still inside when Redis has forgotten them."""
    count, dice = 40, random.Random(7)
    fleet = {process.pid: process for process in (start() for _ in range(4))}
    until(lambda: active(db) == 4, 30)
    send(bus, api, count, ("page", "page", "block"), LEASE / 2)
    for number in range(4):
        pid = until(lambda: next(iter(sorted({int(who) for who in api.callers()} & set(fleet))), 0), 60)
        if number % 2:
            process = fleet.pop(pid)
            process.kill()
            process.wait()
            began = start()
            fleet[began.pid] = began
        redis_server.flush()
        time.sleep(dice.random())  # the moments of the losses are anybody's guess
    until(lambda: completed(db) == count, 90, what=lambda: f"{completed(db)} done, {api.inside} inside")
    assert api.peak <= PERMITS
    check_all_done(bus, db, count)


@pytest.mark.slow
@pytest.mark.alone  # calls that were under way when the 429 came must end within 0.3 s to be told from later ones
def test_ac3_a_429_told_to_one_worker_is_heard_by_the_fleet_and_one_probe_goes_first(
    bus: CommandBus, db: Db, api: ApiStub, start: Callable[[], Process]
) -> None:
    count = 40
    for _ in range(4):
        start()
    until(lambda: active(db) == 4, 30)
    api.plan(*[Reply(seconds=0.05)] * 10, too_many("2"))
    send(bus, api, count, ("page",), None)
    until(lambda: completed(db) == count, 60, what=lambda: f"{completed(db)} done, {api.inside} inside")
    (refused,) = [visit for visit in api.visits if visit.status == 429]
    told = refused.ended or 0
    after = sorted(visit.began for visit in api.visits if visit.began > told + 0.3)
    assert after[0] >= told + 1.9, "nobody calls before it is over"
    (probe,) = [visit for visit in api.visits if visit.began == after[0]]
    assert after[1] >= (probe.ended or 0), "one probe, and then all"
    assert one(db, "SELECT max(attempt - waived) FROM commandbus.command") == 1, "a 429 spends no attempt"
    check_all_done(bus, db, count)


@pytest.mark.slow
def test_a_killed_probe_is_followed_by_another_after_its_lease(
    bus: CommandBus, db: Db, api: ApiStub, start: Callable[[], Process]
) -> None:
    fleet = {str(process.pid): process for process in (start() for _ in range(3))}
    until(lambda: active(db) == 3, 30)
    api.plan(too_many("1"), Reply(hangs=True))
    send(bus, api, 1, ("page",), None)
    until(lambda: bus.get_limit("docai").state != "AVAILABLE")
    send(bus, api, 5, ("page",), None, first=1)
    probe = until(lambda: next((visit for visit in list(api.visits)[1:] if visit.ended is None), None), 20)
    assert [visit.status for visit in api.visits] == [429, None]
    fleet[probe.who].kill()
    fleet[probe.who].wait()
    until(lambda: completed(db) == 6, 40, what=lambda: f"{completed(db)} done, {api.inside} inside")
    second = api.visits[2]
    assert second.began - probe.began >= LEASE * 0.6, "its lease had been renewed a third of it before, at most"
    assert len([visit for visit in api.visits if visit.began < (second.ended or 0)]) == 3, "alone"
    check_all_done(bus, db, 6)
