"""isolation="process" in a whole worker: the ladder kills one process, and nobody else notices."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, NewCommand, Worker
from commandbus.worker.isolation.attempt_in_child import Child
from commandbus.worker.isolation.isolation import Isolation
from support.isolated_handlers import handlers
from support.waiting import Stopwatch, one, until, until_settled
from support.workers import short_lease

StartWorker = Callable[..., Worker]
QUICK = {"visibility_timeout": 5.0, "statement_timeout": 4.0, "cancel_grace": 0.5, "concurrency": 2}


def status(bus: CommandBus, command_id: str) -> str | None:
    record = bus.get_command("orders", command_id)
    return None if record is None else str(record.status)


def last(bus: CommandBus, command_id: str) -> Any:
    return bus.get_attempts("orders", command_id)[-1]


@pytest.mark.parametrize("how", ["spin", "regex", "swallow"])
def test_a_hanging_isolated_handler_is_killed_in_time_and_neighbours_go_on(
    bus: CommandBus, start_worker: StartWorker, how: str
) -> None:
    worker = start_worker(handlers, **QUICK)
    hung = bus.send("orders", "hang", {"how": how}, timeout=1, max_attempts=1).command_id
    assert worker._runtime is not None
    running = worker._runtime.attempts.running
    until(lambda: [one for one in list(running) if one.command_id == hung])
    others = [sent.command_id for sent in bus.send_many("orders", [NewCommand("thread")] * 20)]
    until(lambda: status(bus, hung) == "IN_TROUBLESHOOTING_QUEUE", 1 + 0.5 + 2)  # its timeout, the grace, the rest
    until(lambda: all(status(bus, id_) == "COMPLETED" for id_ in others))
    said = last(bus, hung)
    assert all(bus.get_command("orders", id_).finished_at < said.finished_at for id_ in others)  # type: ignore[union-attr]
    assert (said.verdict, said.error_type, said.rung) == ("EXHAUSTED", "ExecutionStuck", "kill")
    assert "in hang" in str(said.autopsy)
    assert worker.is_running
    after = bus.send("orders", "echo").command_id
    until(lambda: status(bus, after) == "COMPLETED")


def test_a_running_isolated_command_can_be_cancelled(bus: CommandBus, start_worker: StartWorker) -> None:
    worker = start_worker(handlers, **QUICK)
    sent = bus.send("orders", "sleep_async", timeout=60).command_id
    assert worker._runtime is not None
    running = worker._runtime.attempts.running
    until(lambda: any(attempt.child is not None and attempt.child.has_begun for attempt in list(running)))
    bus.cancel("orders", sent, operator="ann", reason="enough")
    until(lambda: status(bus, sent) == "CANCELED")


def test_what_hangs_in_a_query_is_stopped_by_the_cancel_of_its_query(
    bus: CommandBus, start_worker: StartWorker, db: psycopg.Connection[Any]
) -> None:
    db.execute("CREATE TABLE effects (what text)")
    start_worker(handlers, **QUICK | {"cancel_grace": 4.0, "visibility_timeout": 20.0, "statement_timeout": 19.0})
    warm = bus.send("orders", "echo").command_id
    until(lambda: status(bus, warm) == "COMPLETED")
    sent = bus.send("orders", "sleep_in_sql", timeout=2, max_attempts=1).command_id
    until(lambda: status(bus, sent) == "IN_TROUBLESHOOTING_QUEUE")
    assert last(bus, sent).rung == "deadline"
    assert one(db, "SELECT count(*) FROM effects") == 0


@pytest.mark.parametrize("how", ["spin", "stop"])  # a process that is stopped never says where it is
def test_a_shutdown_stops_what_is_isolated(bus: CommandBus, start_worker: StartWorker, how: str) -> None:
    worker = start_worker(handlers, **QUICK | {"shutdown_timeout": 4.0})
    sent = bus.send("orders", "hang", {"how": how}, timeout=0).command_id
    assert worker._runtime is not None
    running = worker._runtime.attempts.running
    until(lambda: any(attempt.child is not None and attempt.child.has_begun for attempt in list(running)))
    stopwatch = Stopwatch()
    report = worker.stop(wait=4)
    assert stopwatch.seconds(waits=4.0) < 5
    assert report.unwritten == 0
    assert last(bus, sent).verdict == "WAIVED"


def test_extend_and_progress_reach_the_database(
    bus: CommandBus, start_worker: StartWorker, db: psycopg.Connection[Any]
) -> None:
    start_worker(handlers, **QUICK)
    sent = [bus.send("orders", kind, {"seconds": 60}).command_id for kind in ("extend", "extend_async")]
    until_settled(db)
    for command_id in sent:
        record = bus.get_command("orders", command_id)
        assert record is not None
        assert record.result[1] > 55


@pytest.mark.parametrize("command_type", ["extend_after", "extend_after_async"])
def test_an_answer_that_comes_after_its_question_was_given_up_harms_nobody(
    bus: CommandBus,
    start_worker: StartWorker,
    db: psycopg.Connection[Any],
    database: str,
    tmp_path: Path,
    command_type: str,
) -> None:
    """The deadline passes while extend waits for a locked queue row. Its process is used again, and hears well."""
    start_worker(handlers, **QUICK | {"concurrency": 1, "visibility_timeout": 30.0})
    sent = bus.send("orders", command_type, {"folder": str(tmp_path)}, timeout=2, max_attempts=2).command_id
    until(lambda: (tmp_path / "here1").exists())
    with psycopg.connect(database) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        (tmp_path / "go").touch()
        until(lambda: (tmp_path / "raised").exists())
    until_settled(db)
    assert (tmp_path / "raised").read_text().startswith(("DeadlineExceededError", "CancelledError"))
    record = bus.get_command("orders", sent)
    assert record is not None
    assert record.status == "COMPLETED", last(bus, sent)
    assert record.result[1] == 2
    assert record.result[2] > 50


@pytest.mark.slow
@pytest.mark.parametrize("command_type", ["extend_after", "extend_after_async"])
def test_extend_says_so_when_the_lease_cannot_be_renewed_and_the_deadline_stays(
    bus: CommandBus,
    start_worker: StartWorker,
    db: psycopg.Connection[Any],
    database: str,
    tmp_path: Path,
    command_type: str,
    ladder_waits: None,
) -> None:
    """The worker does not move the deadline after the handler was told that it stays where it is."""
    worker = start_worker(handlers, **QUICK | short_lease(concurrency=1))
    assert worker._runtime is not None
    sent = bus.send("orders", command_type, {"folder": str(tmp_path)}, timeout=30, max_attempts=1).command_id
    until(lambda: (tmp_path / "here1").exists())
    (attempt,) = worker._runtime.attempts.running
    before = attempt.deadline_at
    with psycopg.connect(database) as locking:
        locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        (tmp_path / "go").touch()
        until(lambda: (tmp_path / "raised").exists())
    said = (tmp_path / "raised").read_text()
    assert re.match(
        "TimeoutError: the lease of .* another transaction has held its queue row for 1.5 s; its deadl", said
    )
    free = one(db, "SELECT now()")
    until(lambda: one(db, "SELECT vt > %s + interval '1 s' FROM pgmq.q_orders__commands", free))
    (tmp_path / "end").touch()
    until_settled(db)
    record = bus.get_command("orders", sent)
    assert record is not None
    assert (record.status, record.attempts) == ("COMPLETED", 1)
    assert record.result[2] < 30
    assert attempt.deadline_at == before


@pytest.fixture
def ladder_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are not asked to stop when their leases are late: what else becomes of them is seen."""
    monkeypatch.setattr("commandbus.model.timeouts.Timeouts.late_seconds", property(lambda _: 60.0))


def test_a_transaction_that_keeps_its_snapshot_has_its_queue_row_left_alone(
    bus: CommandBus, start_worker: StartWorker, db: psycopg.Connection[Any]
) -> None:
    start_worker(handlers, **QUICK | short_lease())
    sent = bus.send("orders", "snapshot", {"seconds": 2}, timeout=30, max_attempts=1).command_id
    until_settled(db)
    record = bus.get_command("orders", sent)
    assert record is not None
    assert record.result == "kept"


def test_a_process_that_cannot_start_a_thread_costs_its_command_nothing(
    bus: CommandBus,
    start_worker: StartWorker,
    db: psycopg.Connection[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has no thread left, in the child process as everywhere else."""
    none_left, tried = tmp_path / "none_left", tmp_path / "tried"
    none_left.touch()
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, sys, threading\n"
        "ours = 'commandbus.worker.isolation.child_main' in sys.orig_argv\n"
        f"if ours and pathlib.Path({str(none_left)!r}).exists():\n"
        "    def refuse(*_, **__):\n"
        f"        pathlib.Path({str(tried)!r}).touch()\n"
        '        raise RuntimeError("can\'t start new thread")\n'
        "    threading._start_new_thread = threading._start_joinable_thread = refuse\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    start_worker(handlers, **QUICK)
    sent = bus.send("orders", "echo", max_attempts=1).command_id
    until(tried.exists)
    none_left.unlink()
    until(lambda: status(bus, sent) == "COMPLETED", 30)
    assert {attempt.verdict for attempt in bus.get_attempts("orders", sent)} <= {"WAIVED", "GIVEN_BACK"}


def test_every_slot_may_be_isolated_at_once(
    bus: CommandBus, start_worker: StartWorker, db: psycopg.Connection[Any]
) -> None:
    start_worker(handlers, **QUICK | {"concurrency": 4})
    for _ in range(40):
        bus.send("orders", "echo")
    until_settled(db)
    pids = {record.result["pid"] for record in bus.query_commands(domain="orders").items}
    assert os.getpid() not in pids
    assert len(pids) <= 4


def test_an_attempt_that_is_canceled_while_its_process_is_made_never_runs(
    bus: CommandBus, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, db: psycopg.Connection[Any]
) -> None:
    may_start = threading.Event()
    make = Isolation._make

    def make_late(self: Isolation) -> Any:
        assert may_start.wait(60)
        return make(self)

    monkeypatch.setattr(Isolation, "_make", make_late)
    worker = start_worker(handlers, **QUICK)
    late = bus.send("orders", "echo", timeout=0.2, max_attempts=1).command_id
    until(lambda: status(bus, late) == "IN_PROGRESS")
    bus.cancel("orders", late, operator="ann", reason="enough")
    until(lambda: status(bus, late) == "CANCELED")
    runs: list[str] = []
    monkeypatch.setattr(Child, "begin", lambda self: runs.append(self._attempt.command_id))
    may_start.set()
    assert worker._runtime is not None
    children = worker._runtime._isolation._children
    until(lambda: children._idle and not children._busy)
    assert runs == []
    monkeypatch.undo()
    after = bus.send("orders", "echo").command_id
    until(lambda: status(bus, after) == "COMPLETED")


def test_the_stack_of_a_running_child_process_and_its_autopsy_later(
    bus: CommandBus, db: psycopg.Connection[Any], start_worker: StartWorker
) -> None:
    worker = start_worker(handlers, concurrency=1, cancel_grace=0.3)
    bus.send("orders", "hang", {"how": "swallow"}, command_id="h", timeout=6)
    found = until(lambda: (asked := bus.request_stack("orders", "h", wait=5)).stacks and asked)
    assert (found.worker, found.problem) == (worker.id, None)
    functions = [frame.function for stack in found.stacks for frame in stack.frames]
    assert "hang" in functions
    assert any(frame.file.endswith("isolated_handlers.py") for stack in found.stacks for frame in stack.frames)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.attempt WHERE rung = 'kill'"))
    autopsy = one(db, "SELECT autopsy FROM commandbus.attempt WHERE rung = 'kill' LIMIT 1")
    assert autopsy["process"]["dump"].count("Current thread") == 1, "what was sampled is no part of the autopsy"
