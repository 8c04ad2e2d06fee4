"""The supervisor as a process: stopping, reloading, restarting, probes; and nobody is left when it dies."""

from __future__ import annotations

import os
import pty
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from commandbus import CommandBus, CommandStatus
from commandbus.cli.exit_codes import ExitCode
from support.supervised import SOURCES, Supervised
from support.waiting import Stopwatch, one, statuses, until, until_settled

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]
Impatient = Callable[[str], None]
WAITS = "so this start waits for it"


def status_of(bus: CommandBus, command_id: str) -> CommandStatus:
    record = bus.get_command("orders", command_id)
    assert record is not None
    return record.status


def is_running(tasks: Path, *names: str) -> None:
    until(lambda: all((tasks / f"{name}.started").exists() for name in names), what=f"{names} did not start")


# --- stopping ----------------------------------------------------------------------------------------------


def test_sigterm_with_stuck_work_ends_in_time_and_says_so(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    supervised = supervise(shutdown_timeout="4s", task_timeout="0", concurrency=1).until_ready()
    for n in range(3):
        bus.send("orders", "sleep", command_id=f"c{n}")
    is_running(tasks, "c0")
    stopwatch = Stopwatch()
    code, report = supervised.stop()
    assert stopwatch.seconds(waits=3.5) < 4.0
    assert code == ExitCode.LEFT_BEHIND
    assert (report["abandoned"], report["unwritten"], report["reason"]) == (1, 0, "SIGTERM")
    assert supervised.processes() == {}
    # What had not started is back, what ran is waived, and nobody holds anything.
    assert statuses(db) == {"PENDING": 3}
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers IS NOT NULL OR vt > now()") == 0
    assert (
        one(
            db,
            "SELECT max(read_ct - waived) FROM pgmq.q_orders__commands q JOIN commandbus.command USING (msg_id)",
        )
        == 0
    )


def test_sigterm_ends_a_frozen_worker_too(supervise: Supervise, tasks: Path, bus: CommandBus, db: Db) -> None:
    supervised = supervise(shutdown_timeout="4s", task_timeout="0", heartbeat_timeout="30s").until_ready()
    bus.send("orders", "freeze", command_id="a")
    until((tasks / "a.started").exists)
    stopwatch = Stopwatch()
    code, report = supervised.stop()
    assert stopwatch.seconds(waits=4.0) < 4.5
    assert (code, report["abandoned"]) == (ExitCode.LEFT_BEHIND, 1)
    assert supervised.processes() == {}
    assert one(db, "SELECT verdict FROM commandbus.attempt") == "WAIVED"


def test_what_runs_may_finish(supervise: Supervise, tasks: Path, bus: CommandBus, db: Db) -> None:
    supervised = supervise().until_ready()
    bus.send("orders", "hold", command_id="a")
    is_running(tasks, "a")
    supervised.signal(signal.SIGTERM)
    supervised.until_said("stops (SIGTERM)")
    (tasks / "go").touch()
    code, report = supervised.end()
    assert (code, report["abandoned"], report["settled"]) == (0, 0, 1)
    assert statuses(db) == {"COMPLETED": 1}


def test_a_second_signal_ends_at_once(supervise: Supervise, tasks: Path, bus: CommandBus, db: Db) -> None:
    supervised = supervise(shutdown_timeout="30s", task_timeout="0").until_ready()
    bus.send("orders", "sleep", command_id="a")
    is_running(tasks, "a")
    supervised.signal(signal.SIGTERM)
    supervised.until_said("stops (SIGTERM)")
    stopwatch = Stopwatch()
    code, _ = supervised.stop()
    assert stopwatch.seconds() < 1.5
    assert code == ExitCode.LEFT_BEHIND
    assert supervised.processes() == {}
    assert one(db, "SELECT verdict FROM commandbus.attempt") == "WAIVED"


def test_sigterm_during_the_start_ends_at_once(supervise: Supervise, tasks: Path) -> None:
    (tasks / "tasks.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(600)\n")
    supervised = supervise()
    until(lambda: (tasks / "importing").exists())
    stopwatch = Stopwatch()
    assert supervised.stop()[0] == 0
    assert stopwatch.seconds() < 3
    assert supervised.processes() == {}


def test_sigkill_of_the_supervisor_leaves_no_process(supervise: Supervise, tasks: Path, bus: CommandBus) -> None:
    supervised = supervise(processes=2, task_timeout="0").until_ready(2)
    for n in range(8):
        bus.send("orders", "sleep", command_id=f"c{n}")
    is_running(tasks, *(f"c{n}" for n in range(8)))
    assert len(supervised.workers()) == 2
    supervised.process.kill()
    until(lambda: not supervised.processes(), 3, what=supervised.processes)


# --- replacing ---------------------------------------------------------------------------------------------


def test_a_draining_worker_is_replaced_at_once_and_ends_when_its_healthy_work_is_done(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    supervised = supervise(max_attempts=1).until_ready()
    bus.send("orders", "hold", command_id="healthy")
    is_running(tasks, "healthy")
    (first,) = supervised.workers()
    bus.send("orders", "sleep", command_id="stuck")
    until(lambda: status_of(bus, "stuck") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    supervised.until_ready(2)
    assert first in supervised.workers()
    assert len(supervised.workers()) == 2
    for n in range(8):
        bus.send("orders", "quick", command_id=f"c{n}")
    until(lambda: statuses(db).get("COMPLETED") == 8)
    (tasks / "go").touch()
    until_settled(db)
    until(lambda: first not in supervised.workers())
    record = bus.get_command("orders", "healthy")
    assert record is not None
    assert (record.status, record.attempts) == (CommandStatus.COMPLETED, 1)
    assert supervised.stop()[0] == 0


def test_no_more_workers_drain_for_long_than_there_are_processes(
    supervise: Supervise, impatient: Impatient, tasks: Path, bus: CommandBus, db: Db
) -> None:
    impatient("worker_processes.DRAIN_SECONDS = 1.0")
    supervised = supervise(max_attempts=1).until_ready()
    for round_ in range(3):
        bus.send("orders", "hold", command_id=f"h{round_}")
        is_running(tasks, f"h{round_}")
        bus.send("orders", "sleep", command_id=f"s{round_}")
        until(lambda n=round_: status_of(bus, f"s{n}") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
        supervised.until_ready(round_ + 2)
    supervised.until_said("must end")
    until(lambda: len(supervised.workers()) <= 2)
    (tasks / "go").touch()
    until(lambda: statuses(db).get("COMPLETED") == 3)
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'WAIVED'") >= 1


def test_a_drain_does_not_hurry_work_that_is_within_its_deadline(
    supervise: Supervise, impatient: Impatient, tasks: Path, bus: CommandBus, db: Db
) -> None:
    """Promise 5. In each of the workers that drain one attempt has a deadline, and one has none."""
    impatient("worker_processes.DRAIN_SECONDS = 0.5")
    supervised = supervise().until_ready()
    for n in range(2):
        bus.send("orders", "hold_with_deadline", command_id=f"timed{n}")
        bus.send("orders", "hold", command_id=f"endless{n}")
        is_running(tasks, f"timed{n}", f"endless{n}")
        supervised.signal(signal.SIGHUP)
        supervised.until_said("1 new worker has taken over", times=n + 1)
    supervised.until_said("so its 1 attempt without a deadline must end")
    until(lambda: one(db, "SELECT count(*) > 0 FROM commandbus.attempt WHERE verdict = 'WAIVED'"))
    (tasks / "go").touch()
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 4}
    assert {record.attempts for n in range(2) if (record := bus.get_command("orders", f"timed{n}"))} == {1}
    until(lambda: len(supervised.workers()) == 1)
    code, report = supervised.stop()
    assert code == 0, (report, supervised.log)


def test_workers_that_die_at_once_are_restarted_ever_more_slowly(supervise: Supervise, tasks: Path) -> None:
    supervised = supervise().until_ready()
    (tasks / "tasks.py").write_text("import os\nos._exit(9)\n")
    (pid,) = supervised.workers()
    os.kill(pid, signal.SIGKILL)
    supervised.until_said("still failing (2 times), for the same cause: next in 2 s")
    assert supervised.log.index("next in 1 s") < supervised.log.index("next in 2 s")
    assert supervised.log.count("ended with exit code 9 while it was starting (importing tasks:handlers)") == 1
    code, document = supervised.ask("/health/ready")
    assert (code, document["reasons"]) == (503, ["no worker is ready"])
    assert supervised.ask("/health/live")[0] == 200
    assert supervised.stop()[0] == 0


def test_a_worker_over_twice_its_memory_is_killed_and_its_attempts_are_suspects(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    source = (tasks / "tasks.py").read_text()
    (tasks / "tasks.py").write_text(
        source
        + """
@handlers.handler("orders", "hog", timeout=0)
def hog(command, ctx):
    if ctx.attempt_number > 1:
        return
    kept = bytearray(400_000_000)
    while True:
        time.sleep(0.1)
"""
    )
    # A long lease: on a busy machine it must not end before the supervisor has settled the attempt.
    supervised = supervise(max_memory_mb=150, max_attempts=3, visibility_timeout="15s").until_ready()
    bus.send("orders", "hog", command_id="a")
    until_settled(db)
    found = db.execute("SELECT verdict, error, rung FROM commandbus.attempt").fetchall()
    assert [(verdict, rung) for verdict, _, rung in found] == [("WAIVED", "kill")]
    assert "max_memory_mb (150)" in found[0][1]
    assert supervised.stop()[0] == 0


# --- reloading ---------------------------------------------------------------------------------------------


def test_sighup_brings_new_code_and_the_old_worker_finishes_its_work(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    supervised = supervise(processes=2).until_ready(2)
    before = set(supervised.workers())
    bus.send("orders", "hold", command_id="old")
    is_running(tasks, "old")
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text().replace("VERSION = 1", "VERSION = 2"))
    supervised.signal(signal.SIGHUP)
    supervised.until_said("2 new workers have taken over")
    bus.send("orders", "quick", command_id="new")
    until(lambda: status_of(bus, "new") is CommandStatus.COMPLETED)
    record = bus.get_command("orders", "new")
    assert record is not None
    assert record.result == 2
    until(lambda: len(before & supervised.workers().keys()) == 1)
    (tasks / "go").touch()
    until_settled(db)
    until(lambda: not before & supervised.workers().keys())
    old = bus.get_command("orders", "old")
    assert old is not None
    assert (old.status, old.attempts) == (CommandStatus.COMPLETED, 1)
    assert supervised.stop()[0] == 0


def test_sighup_with_broken_code_changes_nothing(supervise: Supervise, tasks: Path, bus: CommandBus) -> None:
    supervised = supervise(processes=2).until_ready(2)
    before = supervised.workers().keys()
    good = (tasks / "tasks.py").read_text()
    (tasks / "tasks.py").write_text("raise RuntimeError('broken')\n")
    supervised.signal(signal.SIGHUP)
    supervised.until_said("the reload failed, and the old workers stay")
    assert "RuntimeError: broken" in supervised.log
    until(lambda: supervised.workers().keys() == before)
    bus.send("orders", "quick", command_id="a")
    until(lambda: status_of(bus, "a") is CommandStatus.COMPLETED)
    code, document = supervised.ask("/health/ready")
    assert (code, document["status"]) == (200, "degraded")
    assert any("the last reload failed" in reason and "broken" in reason for reason in document["reasons"])
    text = supervised.ask("/metrics")[1]
    assert 'commandbus_reloads_total{outcome="failed"} 1' in text
    assert "commandbus_reload_failed 1" in text
    (tasks / "tasks.py").write_text(good)
    supervised.signal(signal.SIGHUP)
    supervised.until_said("taken over")
    until(lambda: supervised.ask("/health/ready")[1]["reasons"] == [])
    text = supervised.ask("/metrics")[1]
    assert 'commandbus_reloads_total{outcome="done"} 1' in text
    assert "commandbus_reload_failed 0" in text
    until(lambda: not before & supervised.workers().keys())
    assert supervised.stop()[0] == 0


def test_sighup_with_settings_that_cannot_be_read_shows_in_health_and_metrics(
    supervise: Supervise, tasks: Path
) -> None:
    supervised = supervise().until_ready()
    until(lambda: supervised.ask("/health/ready")[1]["reasons"] == [])
    (tasks / "commandbus.toml").write_text("[worker\n")
    supervised.signal(signal.SIGHUP)
    supervised.until_said("the reload failed, and the old workers stay: the settings cannot be read")
    until(lambda: "the settings cannot be read" in str(supervised.ask("/health/ready")[1]["reasons"]))
    assert "commandbus_reload_failed 1" in supervised.ask("/metrics")[1]
    assert supervised.stop()[0] == 0


# --- the first start ---------------------------------------------------------------------------------------


def test_what_keeps_the_first_worker_from_starting_is_the_supervisors_answer(
    supervise: Supervise, tasks: Path
) -> None:
    (tasks / "tasks.py").write_text("raise RuntimeError('at import')\n")
    supervised = supervise(processes=2)
    assert supervised.end()[0] == ExitCode.CONFIGURATION
    assert "commandbus: error: handlers: importing 'tasks' failed at tasks.py:1: RuntimeError" in supervised.log
    assert supervised.processes() == {}


def test_a_domain_without_handlers_is_told(supervise: Supervise) -> None:
    supervised = supervise(domains="elsewhere")
    assert supervised.end()[0] == ExitCode.CONFIGURATION
    assert "domain elsewhere has no handler in this worker's registry" in supervised.log.splitlines()[-1]


# --- probes ------------------------------------------------------------------------------------------------


def test_probes_of_a_healthy_and_of_a_stopping_supervisor(
    supervise: Supervise, tasks: Path, bus: CommandBus
) -> None:
    supervised = supervise(processes=2, task_timeout="0").until_ready(2)
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    _, document = supervised.ask("/health/ready")
    assert (document["status"], document["phase"]) == ("healthy", "RUNNING")
    assert [worker["state"] for worker in document["workers"]] == ["ACTIVE", "ACTIVE"]
    assert supervised.ask("/health/live")[0] == 200
    bus.send("orders", "sleep", command_id="a")
    is_running(tasks, "a")
    until(lambda: "commandbus_running 1" in supervised.ask("/metrics")[1])
    until(lambda: 'commandbus_ready{domain="orders"} 0' in supervised.ask("/metrics")[1])
    supervised.signal(signal.SIGTERM)
    supervised.until_said("stops (SIGTERM)")
    until(lambda: supervised.ask("/health/ready")[0] == 503, 3)
    assert supervised.ask("/health/live")[0] == 200


@pytest.mark.slow
def test_work_that_nobody_claims_makes_it_unready(
    supervise: Supervise, bus: CommandBus, db: Db, database: str
) -> None:
    supervised = supervise().until_ready()
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    bus.pause("orders", operator="me")
    bus.send("orders", "quick", command_id="a")
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 min', enqueued_at = '2026-01-01Z'")
    with psycopg.connect(database) as other:  # somebody holds the row, so that every claim passes over it
        other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        assert supervised.ask("/health/ready")[0] == 200  # a paused domain has no work
        bus.resume("orders")
        until(lambda: supervised.ask("/health/ready")[0] == 503, 30)
        assert "nothing is being claimed" in str(supervised.ask("/health/ready"))
        assert supervised.ask("/health/live")[0] == 200
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    assert status_of(bus, "a") is CommandStatus.COMPLETED
    assert supervised.stop()[0] == 0


def test_a_worker_that_dies_while_the_database_is_away_is_examined_when_it_is_back(
    supervise: Supervise,
    tasks: Path,
    bus: CommandBus,
    db: Db,
    database: str,
    server_admin: Callable[[sql.Composable], None],
) -> None:
    supervised = supervise(visibility_timeout="60s").until_ready()
    bus.send("orders", "hold", command_id="a")
    is_running(tasks, "a")
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    name = sql.Identifier(database.rpartition("/")[2])
    server_admin(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    (pid,) = supervised.workers()
    os.kill(pid, signal.SIGKILL)
    until(lambda: "database has not answered" in str(supervised.ask("/health/ready")))
    # The replacement is not started, or waits, if it was started before anybody knew that the database is away.
    until(lambda: "1 worker will be started when it is back" in supervised.log or WAITS in supervised.log)
    assert "could not start" not in supervised.log
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0
    server_admin(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
    until(lambda: one(db, "SELECT count(*) = 1 FROM commandbus.attempt WHERE verdict = 'WAIVED'"))
    (tasks / "go").touch()
    until_settled(db, 30)
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    assert supervised.stop()[0] == 0


def test_a_worker_that_is_told_to_end_by_somebody_ends_in_order_and_is_replaced(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    supervised = supervise().until_ready()
    bus.send("orders", "hold", command_id="a")
    is_running(tasks, "a")
    (pid,) = supervised.workers()
    os.kill(pid, signal.SIGTERM)
    (tasks / "go").touch()
    supervised.until_ready(2)
    until(lambda: pid not in supervised.workers())
    assert statuses(db) == {"COMPLETED": 1}
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0
    code, report = supervised.stop()
    assert (code, report["settled"], report["restarts"], report["postmortems"]) == (0, 1, 1, 0)


@pytest.mark.slow
def test_an_embedded_server_is_the_supervisors_and_outlives_its_workers(folder: Path, tasks: Path) -> None:
    url = f"embedded:{folder / 'data'}"
    with CommandBus(url) as bus:
        bus.migrate()
        bus.create_domain("orders")
        supervised = Supervised(tasks, url)
        try:
            supervised.until_ready()
            (pid,) = supervised.workers()
            os.kill(pid, signal.SIGKILL)
            supervised.until_ready(2)
            bus.send("orders", "quick", command_id="a")
            until(lambda: status_of(bus, "a") is CommandStatus.COMPLETED)
            assert supervised.stop()[0] == 0
        finally:
            supervised.clear_away()


# --- the service manager -----------------------------------------------------------------------------------


def test_systemd_is_told(supervise: Supervise, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tasks / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        monkeypatch.setenv("WATCHDOG_USEC", "1500000")

        def told(word: str) -> str:
            while word not in (message := manager.recv(4096).decode()):
                assert "READY=1" not in message, f"{message} before {word}"
            return message

        supervised = supervise()
        assert "STATUS=1 worker" in told("READY=1")
        told("WATCHDOG=1")
        told("WATCHDOG=1")
        supervised.signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in told("RELOADING=1")
        assert "taken over" in told("READY=1")
        supervised.signal(signal.SIGTERM)
        told("STOPPING=1")
        assert supervised.end()[0] == 0


def test_a_closed_terminal_ends_it_and_does_not_reload_it(tasks: Path, bus: CommandBus, database: str) -> None:
    log = tasks / "log"
    log.touch()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tasks)
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
        own = {"PYTHONPATH": SOURCES, "COMMANDBUS_DATABASE_URL": database, "WORKER_HANDLERS": "tasks:handlers"}
        os.execve(sys.executable, [sys.executable, "-m", "commandbus.worker"], os.environ | own)
    try:
        until(lambda: "is ready (process" in log.read_text())
        os.kill(pid, signal.SIGHUP)
        until(lambda: "has taken over" in log.read_text())
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "stops (SIGHUP)" in log.read_text()
