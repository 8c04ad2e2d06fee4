"""A supervisor in trouble: workers that fail, hang or crash while they start, reloads in a row, a taken port."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus
from commandbus.cli.exit_codes import ExitCode
from support.supervised import Supervised
from support.waiting import one, statuses, until, until_settled

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]
Impatient = Callable[[str], None]


def is_running(tasks: Path, name: str) -> None:
    until(lambda: (tasks / f"{name}.started").exists(), what=f"{name} did not start")


def errors_in(supervised: Supervised) -> list[str]:
    """All lines but those about the test's short limits."""
    return [line for line in supervised.log.splitlines() if "WARNING commandbus.worker" not in line]


@pytest.mark.long
def test_a_worker_that_lives_on_does_not_make_others_start_in_a_storm(
    supervise: Supervise, impatient: Impatient, tasks: Path
) -> None:
    impatient("worker_processes.EARLY_SECONDS = restart_budget.EARLY_SECONDS = 3.0")
    supervised = supervise(processes=2).until_ready(2)
    good = (tasks / "tasks.py").read_text()
    (tasks / "tasks.py").write_text("raise RuntimeError('broken')\n")
    os.kill(min(supervised.workers()), signal.SIGKILL)
    supervised.until_said("still failing (3 times), for the same cause: next in 4 s")
    log = supervised.log
    assert log.count("RuntimeError: broken") == 1
    assert [log.count(f"next in {pause} s") for pause in (1, 2, 4)] == [1, 1, 1]
    (tasks / "tasks.py").write_text(good)
    supervised.until_ready(3)
    assert supervised.stop()[0] == 0


def test_reloads_in_a_row_hurry_nobody(supervise: Supervise, tasks: Path, bus: CommandBus, db: Db) -> None:
    supervised = supervise().until_ready()
    for n in range(3):
        bus.send("orders", "hold", command_id=f"c{n}")
        is_running(tasks, f"c{n}")
        supervised.signal(signal.SIGHUP)
        supervised.until_said("1 new worker has taken over", times=n + 1)
    until(lambda: one(db, "SELECT count(*) = 3 FROM commandbus.worker WHERE state = 'DRAINING'"))
    assert len(supervised.workers()) == 4
    (tasks / "go").touch()
    until_settled(db)
    until(lambda: len(supervised.workers()) == 1)
    assert "must end" not in supervised.log
    assert statuses(db) == {"COMPLETED": 3}
    assert db.execute("SELECT * FROM commandbus.attempt").fetchall() == []
    assert supervised.stop()[0] == 0


def test_a_health_port_in_use_is_one_line(supervise: Supervise) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        supervised = supervise(health_host="127.0.0.1", health_port=port)
        assert supervised.end()[0] == ExitCode.CONFIGURATION
    (line,) = errors_in(supervised)
    assert f"health_port {port} on 127.0.0.1 is in use" in line


def test_a_health_host_that_does_not_exist_is_one_line(supervise: Supervise) -> None:
    supervised = supervise(health_host="nowhere.invalid", health_port=8099)
    assert supervised.end()[0] == ExitCode.CONFIGURATION
    (line,) = errors_in(supervised)
    assert "cannot listen on health_host nowhere.invalid, health_port 8099" in line


def test_a_worker_that_hangs_at_import_is_told_with_its_line(
    supervise: Supervise, impatient: Impatient, tasks: Path
) -> None:
    impatient("worker_start.SLOW_SECONDS = 1.0; worker_start.AGAIN_SECONDS = 1.0")
    (tasks / "tasks.py").write_text("import threading\n\nthreading.Event().wait(600)\n")
    supervised = supervise()
    where = f"(importing tasks:handlers), at {tasks / 'tasks.py'}:3"
    supervised.until_said(where, times=2)
    assert "WARNING" in next(line for line in supervised.log.splitlines() if where in line)
    code, document = supervised.ask("/health/ready")
    assert code == 503
    assert "no worker is ready: worker process" in document["reasons"][0]
    assert where in document["reasons"][0]
    assert supervised.ask("/health/live")[0] == 200
    assert supervised.stop()[0] == 0


@pytest.mark.waits
def test_a_worker_that_is_not_ready_in_time_is_replaced(
    supervise: Supervise, impatient: Impatient, tasks: Path
) -> None:
    impatient("worker_processes.START_SECONDS = 5.0")  # a busy machine may need two, only to start Python
    good = (tasks / "tasks.py").read_text()
    (tasks / "tasks.py").write_text("import threading\n\nthreading.Event().wait(600)\n")
    supervised = supervise()
    supervised.until_said(f"was not ready after 5 s (importing tasks:handlers), at {tasks / 'tasks.py'}:3")
    (tasks / "tasks.py").write_text(good)
    supervised.until_ready()
    assert supervised.stop()[0] == 0


def test_a_first_worker_that_crashes_at_import_is_told_with_its_line_and_tried_again(
    supervise: Supervise, tasks: Path
) -> None:
    good = (tasks / "tasks.py").read_text()
    (tasks / "tasks.py").write_text("import ctypes\nctypes.string_at(0)\n")
    supervised = supervise()
    supervised.until_said(
        f"died of SIGSEGV while it was starting (importing tasks:handlers), at {tasks / 'tasks.py'}:2"
    )
    supervised.until_said("next in 1 s")
    (tasks / "tasks.py").write_text(good)
    supervised.until_ready()
    assert supervised.stop()[0] == 0


def test_under_nohup_there_is_no_reload_and_it_says_so(supervise: Supervise) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        supervised = supervise()
    finally:
        signal.signal(signal.SIGHUP, before)
    supervised.until_ready()
    assert "SIGHUP is ignored (nohup): it will not reload the settings" in supervised.log
    supervised.signal(signal.SIGHUP)
    assert supervised.stop()[0] == 0
    assert "taken over" not in supervised.log


@pytest.mark.parametrize("stuck", [True, False])
def test_a_stop_in_order_needs_no_post_mortem(
    supervise: Supervise, tasks: Path, bus: CommandBus, stuck: bool
) -> None:
    supervised = supervise(shutdown_timeout="4s", task_timeout="0").until_ready()
    if stuck:
        bus.send("orders", "sleep", command_id="a")
        is_running(tasks, "a")
    assert supervised.stop()[0] == (ExitCode.LEFT_BEHIND if stuck else 0)
    assert "post-mortem" not in supervised.log
    assert "runs 1 worker\n" in supervised.log
