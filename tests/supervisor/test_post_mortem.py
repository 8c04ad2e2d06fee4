"""Workers that die: what they held is settled within a second, by who did it, and capacity is back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandStatus, Priority
from support.supervised import Supervised
from support.waiting import Stopwatch, one, statuses, until, until_settled, verdicts

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]


def running(tasks: Path, *names: str) -> None:
    """Until these commands run."""
    until(lambda: all((tasks / f"{name}.started").exists() for name in names), what=f"{names} did not start")


def attempt(db: Db, command_id: str, number: int = 1) -> dict[str, Any]:
    """What was written down about an attempt."""
    cursor = db.execute(
        "SELECT a.verdict, a.error_type, a.error_code, a.error, a.rung, a.autopsy, a.duration_ms, a.finished_at, "
        "extract(epoch FROM a.finished_at - a.started_at)::float8 AS seconds, a.worker "
        "FROM commandbus.attempt a JOIN commandbus.command c ON c.id = a.command "
        "WHERE c.command_id = %s AND a.number = %s",
        (command_id, number),
    )
    row = cursor.fetchone()
    assert row is not None, f"no attempt {number} of {command_id}"
    return dict(zip([column.name for column in cursor.description or []], row, strict=True))


def is_back(bus: CommandBus, name: str) -> None:
    """Full capacity: as many as there are slots run at once again."""
    for n in range(8):
        bus.send("orders", "quick", command_id=f"{name}{n}")
    until(lambda: all(status_of(bus, f"{name}{n}") is CommandStatus.COMPLETED for n in range(8)))


def status_of(bus: CommandBus, command_id: str) -> CommandStatus:
    record = bus.get_command("orders", command_id)
    assert record is not None
    return record.status


@pytest.mark.parametrize("priorities", [("normal", "normal"), ("high", "low")])
def test_kill_9_of_a_worker_is_settled_within_a_second_and_its_attempts_are_suspects(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db, priorities: tuple[Priority, Priority]
) -> None:
    supervised = supervise(visibility_timeout="30s").until_ready()
    for name, priority in zip(("a", "b"), priorities, strict=True):
        bus.send("orders", "hold", command_id=name, priority=priority)
    running(tasks, "a", "b")
    (pid,) = supervised.workers()
    before = one(db, "SELECT clock_timestamp()")
    os.kill(pid, signal.SIGKILL)
    until(lambda: one(db, "SELECT count(*) = 2 FROM commandbus.attempt WHERE verdict = 'WAIVED'"))
    for name in ("a", "b"):
        found = attempt(db, name)
        assert (found["error_type"], found["rung"]) == ("WorkerLost", "crash")
        assert "SIGKILL" in found["error"]
        assert "may have caused it" in found["error"]
        assert (found["finished_at"] - before).total_seconds() < 1.0
        assert found["duration_ms"] > 0
    assert one(db, "SELECT bool_and(suspect = 1) FROM commandbus.command")
    is_back(bus, "after")
    (tasks / "go").touch()
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 10}
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict NOT IN ('WAIVED', 'GIVEN_BACK')") == 0
    dead = one(db, "SELECT state FROM commandbus.worker WHERE pid = %s", pid)
    assert dead == "STOPPED"
    assert one(db, "SELECT died_at IS NOT NULL FROM commandbus.worker WHERE pid = %s", pid)  # for effects


def test_a_crash_names_its_thread_and_bystanders_are_not_charged(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    supervise(max_attempts=3, concurrency=4).until_ready()
    bus.send("orders", "hold", command_id="a")
    bus.send("orders", "hold_async", command_id="b")
    running(tasks, "a", "b")
    bus.send("orders", "segfault", command_id="poison")
    until(lambda: status_of(bus, "poison") is CommandStatus.IN_TROUBLESHOOTING_QUEUE, 30)
    assert verdicts(db, "poison") == [(1, "RETRY"), (2, "RETRY"), (3, "EXHAUSTED")]
    found = attempt(db, "poison")
    assert (found["error_type"], found["error_code"], found["rung"]) == ("WorkerLost", "WORKER_LOST", "crash")
    assert "SIGSEGV in this attempt's thread" in found["error"]
    assert "segfault" in str(found["autopsy"])
    for name in ("a", "b"):
        assert "did not cause it" in attempt(db, name)["error"]
        assert one(db, "SELECT suspect IS NULL FROM commandbus.command WHERE command_id = %s", name)
    (tasks / "go").touch()
    until(lambda: status_of(bus, "a") is status_of(bus, "b") is CommandStatus.COMPLETED)
    # At a later crash they may not have started again yet.
    assert {verdict for _, verdict in verdicts(db, "a") + verdicts(db, "b")} <= {"WAIVED", "GIVEN_BACK"}


def test_a_crash_with_one_running_convicts_it(supervise: Supervise, bus: CommandBus, db: Db) -> None:
    supervised = supervise(max_attempts=1).until_ready()
    bus.send("orders", "segfault", command_id="poison")
    until(lambda: status_of(bus, "poison") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    assert verdicts(db, "poison") == [(1, "EXHAUSTED")]
    assert attempt(db, "poison")["seconds"] < 1.5
    is_back(bus, "after")
    assert supervised.stop()[0] == 0


def test_suspects_of_a_coroner_have_no_more_processes_than_quarantine_allows(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    """Six commands ran in a worker that was killed: two child processes at a time, and slots for others."""
    supervised = supervise(concurrency=6, quarantine_processes=2).until_ready()
    names = [f"s{n}" for n in range(6)]
    for name in names:
        bus.send("orders", "hold", command_id=name)
    running(tasks, *names)
    (pid,) = supervised.workers()
    for name in names:
        (tasks / f"{name}.started").unlink()
    os.kill(pid, signal.SIGKILL)
    until(lambda: len(list(tasks.glob("s?.started"))) == 2, what="two suspects run")
    is_back(bus, "after")
    assert len(list(tasks.glob("s?.started"))) == 2, "the others wait, and hold no slot"
    noted = (
        "SELECT count(*) > 0 FROM commandbus.attempt WHERE error LIKE '%for commands in quarantine are in use%'"
    )
    until(lambda: one(db, noted))
    (tasks / "go").touch()
    until_settled(db)
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status <> 'COMPLETED'") == 0


@pytest.mark.parametrize("limit", [1, 2])
def test_an_exit_with_several_running_makes_suspects_and_isolation_convicts_the_poison(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db, limit: int
) -> None:
    """With max_attempts=1 it starts twice, too, because the first crash names nobody."""
    supervise(max_attempts=limit, concurrency=4, quarantine_processes=3).until_ready()
    for name in ("a", "b"):
        bus.send("orders", "hold", command_id=name)
    running(tasks, "a", "b")
    bus.send("orders", "exit", command_id="poison")
    until(lambda: status_of(bus, "poison") is CommandStatus.IN_TROUBLESHOOTING_QUEUE, 30)
    first = attempt(db, "poison")
    assert (first["verdict"], first["error_type"]) == ("WAIVED", "WorkerLost")
    assert "exit code 1" in first["error"]
    assert "its next attempt runs in a child process" in first["error"]
    ended = [verdict for _, verdict in verdicts(db, "poison") if verdict != "GIVEN_BACK"]
    assert ended == ["WAIVED", "EXHAUSTED"], "it is convicted, and pays for the first crash, too"
    (tasks / "go").touch()
    until(lambda: status_of(bus, "a") is status_of(bus, "b") is CommandStatus.COMPLETED)
    assert {verdict for name in ("a", "b") for _, verdict in verdicts(db, name)} <= {"WAIVED", "GIVEN_BACK"}


@pytest.mark.alone  # it checks how long the kill takes
def test_a_regex_that_holds_the_gil_is_killed_at_its_limit_and_named_by_its_cpu_time(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    supervised = supervise(max_attempts=1).until_ready()
    bus.send("orders", "hold", command_id="a")
    running(tasks, "a")
    stopwatch = Stopwatch()
    bus.send("orders", "regex", command_id="poison")
    until(lambda: status_of(bus, "poison") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    found = attempt(db, "poison")
    assert (found["error_type"], found["error_code"], found["rung"]) == (
        "ExecutionStuck",
        "EXECUTION_STUCK",
        "kill",
    )
    assert "of CPU time" in found["error"]
    assert "in regex" in str(found["autopsy"])
    # task_timeout 1 + grace 0.5 + 0.5, and what a kill and a settlement take
    assert 1.9 < stopwatch.idle(found["seconds"], waits=2.0) < 3.2
    assert 1900 < 1000 * stopwatch.idle(found["duration_ms"] / 1000, waits=2.0) < 3000
    assert attempt(db, "a")["verdict"] == "WAIVED"
    log = supervised.until_said("1 bystander (a), 1 culprit (poison)")
    assert log.count("no heartbeat") == 1
    assert "let no other thread run; to the troubleshooting queue" in log
    (tasks / "go").touch()
    until(lambda: status_of(bus, "a") is CommandStatus.COMPLETED)
    is_back(bus, "after")
    code, report = supervised.stop()
    assert (code, report["postmortems"]) == (0, 1)


def test_a_worker_stopped_from_outside_is_killed_and_nobody_is_charged(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    supervised = supervise(heartbeat_timeout="3s").until_ready()
    bus.send("orders", "hold", command_id="a")
    running(tasks, "a")
    (pid,) = supervised.workers()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: one(db, "SELECT count(*) = 1 FROM commandbus.attempt"))
    found = attempt(db, "a")
    assert (found["verdict"], found["rung"]) == ("WAIVED", "kill")
    assert "stopped from outside" in found["error"]
    is_back(bus, "after")


def test_what_a_handler_forked_ends_with_its_worker(supervise: Supervise, tasks: Path, bus: CommandBus) -> None:
    supervised = supervise(max_attempts=1).until_ready()
    bus.send("orders", "forks", command_id="poison")
    until(lambda: status_of(bus, "poison") is CommandStatus.IN_TROUBLESHOOTING_QUEUE, 30)
    supervised.until_ready(workers=2)
    until(lambda: len(supervised.workers()) == 1)
    forked = int((tasks / "poison.forked").read_text())
    assert forked not in supervised.processes()
    is_back(bus, "after")


def test_a_requested_cancel_is_fulfilled_by_the_post_mortem(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    supervised = supervise(cancel_grace="4s", task_timeout="0").until_ready()
    bus.send("orders", "sleep", command_id="a")
    running(tasks, "a")
    bus.cancel("orders", "a", operator="eve", reason="no need")
    (pid,) = supervised.workers()
    os.kill(pid, signal.SIGKILL)
    until(lambda: status_of(bus, "a") is CommandStatus.CANCELED)
    assert attempt(db, "a")["error"] == "canceled by eve: no need"


def test_a_stuck_statement_of_a_dead_worker_is_ended(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    (tasks / "tasks.py").write_text(
        (tasks / "tasks.py").read_text()
        + """
@handlers.handler("orders", "query", timeout=0)
def query(command, ctx):
    with ctx.connection() as conn:
        Path(command.command_id + ".started").write_text("")
        conn.execute("SET statement_timeout = 0")
        conn.execute("SELECT pg_sleep(600)")
"""
    )
    supervised = supervise().until_ready()
    bus.send("orders", "query", command_id="a")
    running(tasks, "a")
    asleep = (
        "SELECT min(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND query = 'SELECT pg_sleep(600)'"
    )
    session = until(lambda: one(db, asleep))
    (pid,) = supervised.workers()
    os.kill(pid, signal.SIGKILL)
    until(lambda: one(db, "SELECT count(*) > 0 FROM commandbus.attempt"), 3)
    assert one(db, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", session) == 0


@pytest.mark.slow
def test_a_busy_row_is_tried_again(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db, database: str
) -> None:
    supervised = supervise(visibility_timeout="30s").until_ready()
    bus.send("orders", "hold", command_id="a")
    running(tasks, "a")
    (pid,) = supervised.workers()
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        os.kill(pid, signal.SIGKILL)
        supervised.until_ready(workers=2)
        assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0
    until(lambda: one(db, "SELECT count(*) = 1 FROM commandbus.attempt"), 3)
    supervised.until_said("1 suspect (a)")
