"""isolation="process": what a handler's process has started ends with it, and nothing else does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, Worker
from commandbus.worker.isolation import attempt_in_child as child
from commandbus.worker.isolation.attempt_in_child import log_record
from support.isolated_handlers import handlers
from support.isolating import Lab, MakeLab
from support.waiting import one, until

StartWorker = Callable[..., Worker]
OLDER = "SELECT count(*) FROM pg_stat_activity WHERE clock_timestamp() - backend_start > interval '1 s'"
QUICK = {"visibility_timeout": 5.0, "statement_timeout": 4.0, "cancel_grace": 0.5, "concurrency": 2}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """Where `daemonize` writes whom it left behind; gone at the end of the test."""
    file = tmp_path / "pid"
    yield file
    if file.exists() and is_alive(pid := int(file.read_text())):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("clears", [False, True], ids=["", "cleared-environment"])
def test_a_daemon_is_killed_with_the_process_of_a_stuck_attempt(lab: Lab, pids: Path, clears: bool) -> None:
    running = lab.start("daemonize", {"file": str(pids), "clears": clears, "then": "hang"})
    until(lambda: lab.progress)
    left = int(pids.read_text())
    assert is_alive(left)
    assert os.getsid(left) == left
    running.ask_to_stop(grace=0.1)
    lab.settle(running.attempt, running.kill())
    assert not is_alive(left)


def test_a_daemon_is_killed_after_its_process_died_by_itself(lab: Lab, pids: Path) -> None:
    lab.run(lab.claim("daemonize", {"file": str(pids), "then": "exit"}))
    until(lambda: not is_alive(int(pids.read_text())))


def test_what_a_completed_attempt_left_lives_until_the_worker_ends(make_lab: MakeLab, pids: Path) -> None:
    """It may be wanted. Neither a neighbour's end nor anything of the worker's own concerns it."""
    lab = make_lab(concurrency=2)
    left = lab.result("daemonize", {"file": str(pids)})
    running = lab.start("hang", {"how": "sleep"})
    until(lambda: lab.progress)
    beside = lab.start("hang", {"how": "sleep"})
    until(lambda: len(lab.progress) == 2)
    beside.ask_to_stop(grace=0.1)
    with subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True) as own:
        lab.settle(beside.attempt, beside.kill())
        assert running.is_running
        running.ask_to_stop(grace=0.1)
        lab.settle(running.attempt, running.kill())
        lab.isolation.close(5)
        assert own.poll() is None, "it was not started by a handler's process"
        own.kill()
    until(lambda: not is_alive(left))


def test_orphans_that_died_are_buried(make_lab: MakeLab) -> None:
    lab = make_lab(concurrency=1)
    assert max(lab.result("zombies") for _ in range(5)) <= 2, "those of its own attempt"


def test_a_session_that_is_not_the_childs_own_is_left_alone(
    bus: CommandBus, db: psycopg.Connection[Any], database: str, start_worker: StartWorker
) -> None:
    start = "SELECT (extract(epoch FROM backend_start) * 1000000)::bigint FROM pg_stat_activity WHERE pid = %s"
    claimer = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"
    start_worker(handlers, **QUICK)
    pid = until(lambda: db.execute(claimer, ("% claimer",)).fetchall())[0][0]
    with psycopg.connect(database, autocommit=True) as application:
        until(lambda: one(db, f"{OLDER} AND pid = %s", application.info.backend_pid))
        for session in (pid, application.info.backend_pid):
            told = {"pid": session, "started": one(db, start, session)}
            sent = bus.send("orders", "name_session", told, max_attempts=1).command_id
            until(lambda sent=sent: str(bus.get_command("orders", sent).status) == "IN_TROUBLESHOOTING_QUEUE")
        assert one(application, "SELECT 1") == 1
        assert db.execute(claimer, ("% claimer",)).fetchall() == [(pid,)]


def test_the_lock_of_another_attempt_is_no_proof(lab: Lab) -> None:
    attempt = lab.claim("name_session", {"pid": 1, "started": 1, "key": 4711})
    lab.settle(attempt, lab.run(attempt))
    assert "not its own" in lab.last(attempt).error
    assert lab.terminated == []


def test_names_and_levels_of_a_childs_log_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python keeps every logger for ever."""
    monkeypatch.setattr(child, "_names", set())
    monkeypatch.setattr(child, "_MOST_NAMES", 10)
    before = len(logging.root.manager.loggerDict)
    for n in range(100):
        for name in (f"flood{n}", "a." * 90 + str(n), "x" * 300 + str(n)):
            log_record({"name": name, "level": 10**9 + n, "text": "t", "where": {}, "extra": {}}, 1)
    assert len(logging.root.manager.loggerDict) - before <= 12
    assert {record.name for record in caplog.records} <= {f"flood{n}" for n in range(10)} | {"commandbus.isolated"}
    assert {record.levelno for record in caplog.records} == {100}
