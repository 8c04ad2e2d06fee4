"""A handler closes descriptors that are not its own (`os.closerange`): the worker goes on, or is replaced."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, NewCommand, Settings
from commandbus.db.descriptors import WakeFile
from commandbus.db.service_connection import LastingConnection
from support.polling import readable
from support.supervised import SOURCES, Supervised
from support.waiting import one, statuses, until
from support.workers import short_lease

Db = psycopg.Connection[Any]
CLOSERS = ["close", "close_async", "close_in_transaction", "close_and_fill", "close_and_connect"]
AT_ONCE = {"backoff_schedule": [0.1], "backoff_jitter": 0.0}
SCRIPT = Path(__file__).with_name("descriptor_worker.py")
WORKING = """SELECT NOT EXISTS (SELECT FROM commandbus.command
                                WHERE command_type LIKE 'work%' AND status <> 'COMPLETED')"""


@pytest.fixture
def start_application(database: str, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """An application with a worker inside."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        settings = {
            "database_url": database,
            "concurrency": 4,
            "breakers_enabled": False,
            **short_lease(),
            **AT_ONCE,
        }
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(settings), str(tmp_path / "health.json")],
            env=os.environ | {"PYTHONPATH": SOURCES},
            stdin=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def send_work(bus: CommandBus, folder: Path, name: str, n: int = 30) -> None:
    """Sync and async work, by turns."""
    kinds, notes = ("work", "work_async"), str(folder / "notes")
    bus.send_many(
        "orders", [NewCommand(kinds[i % 2], notes, command_id=f"{name}-{i}", max_attempts=10) for i in range(n)]
    )


STUCK = (
    "SELECT c.command_id FROM commandbus.attempt a JOIN commandbus.command c ON c.id = a.command "
    "WHERE a.error_type = 'ExecutionStuck'"
)


def assert_nothing_ran_twice_at_once(folder: Path, db: Db) -> None:
    """Between two beginnings of a command there is an end, unless its process was gone: then none comes later. An
    attempt that is stuck has no end inside an application: nothing can be said of those."""
    stuck = {name for (name,) in db.execute(STUCK)}
    running: dict[str, str] = {}
    for line in dict.fromkeys((folder / "notes").read_text().splitlines()):
        command_id, what, pid, _ = line.split()
        if command_id in stuck:
            continue
        if what == "begins":
            assert running.get(command_id) != pid, f"{command_id} began while it ran"
            running[command_id] = pid
        else:
            assert running.pop(command_id, None) == pid, f"{command_id} ended in {pid} after it began elsewhere"


def parts_in_trouble(folder: Path) -> list[str]:
    """Why its health is critical, without what is counted for five minutes: on a busy machine attempts get stuck
    while their connections are made anew."""
    health = json.loads((folder / "health.json").read_text())
    reasons = health["reasons"] if health["status"] == "critical" else []
    return [reason for reason in reasons if " within 5m (limit " not in reason]


def test_a_connection_whose_number_is_somebody_elses_leaves_it_alone(database: str) -> None:
    """Neither a query nor the end of the session goes to whoever has the number now."""
    connection = LastingConnection(Settings(database_url=database), name="test")
    number = connection.conn.pgconn.socket
    ours, theirs = socket.socketpair()
    os.dup2(ours.fileno(), number)
    with pytest.raises(psycopg.OperationalError, match="has closed the socket"):
        connection.ping()
    assert connection.recover(threading.Event(), psycopg.OperationalError("closed"))
    connection.ping()
    assert os.fstat(number).st_ino == os.fstat(ours.fileno()).st_ino, "it is still open"
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    connection.close()
    os.close(number)
    ours.close()
    theirs.close()


def test_a_wake_file_whose_number_is_somebody_elses_is_made_anew() -> None:
    wake = WakeFile()
    number, (ours, theirs) = wake.descriptor(), socket.socketpair()
    os.dup2(ours.fileno(), number)
    fresh = wake.descriptor()
    wake.write()
    assert readable([fresh], 1) == [fresh]
    assert (wake.times_lost, os.fstat(number).st_ino) == (1, os.fstat(ours.fileno()).st_ino)
    wake.take()
    assert readable([fresh], 0) == []
    wake.close()
    for end in (ours, theirs):
        end.close()
    os.close(number)


@pytest.mark.parametrize("closer", CLOSERS)
@pytest.mark.long
def test_a_worker_in_an_application_goes_on(
    bus: CommandBus,
    db: Db,
    tmp_path: Path,
    start_application: Callable[[], subprocess.Popen[bytes]],
    closer: str,
) -> None:
    process = start_application()
    send_work(bus, tmp_path, "before")
    until(lambda: one(db, WORKING))
    for n in range(3):
        bus.send("orders", closer, max_attempts=1)
        send_work(bus, tmp_path, f"after-{n}")
    until(lambda: one(db, WORKING), what=lambda: (statuses(db), (tmp_path / "health.json").read_text()))
    assert process.poll() is None
    assert_nothing_ran_twice_at_once(tmp_path, db)
    until(lambda: not parts_in_trouble(tmp_path), what=lambda: parts_in_trouble(tmp_path))
    bus.send("orders", "work", str(tmp_path / "notes"), command_id="last")
    until(lambda: one(db, WORKING))


@pytest.mark.parametrize("closer", CLOSERS)
def test_under_a_supervisor_the_worker_is_replaced(
    bus: CommandBus, db: Db, database: str, tmp_path: Path, closer: str
) -> None:
    (tmp_path / "tasks.py").write_text(SCRIPT.read_text())
    supervised = Supervised(tmp_path, database, concurrency=4, task_timeout="10s")
    try:
        supervised.until_ready()
        (first,) = supervised.workers()
        bus.send("orders", closer, max_attempts=1)
        send_work(bus, tmp_path, "after")
        until(lambda: one(db, WORKING), 30, what=lambda: (statuses(db), supervised.log))
        until(lambda: supervised.workers() and first not in supervised.workers(), 30, what=lambda: supervised.log)
        send_work(bus, tmp_path, "later")
        until(lambda: one(db, WORKING), 30, what=lambda: (statuses(db), supervised.log))
        assert_nothing_ran_twice_at_once(tmp_path, db)
        code, _ = supervised.stop()
        assert code == 0, supervised.log
    finally:
        supervised.clear_away()
