"""An isolated attempt begins when a process is ready for it: what comes before is not charged to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Worker
from commandbus.worker.isolation import child_pool as children
from support.isolating import Lab
from support.slow_handlers import handlers as slow_handlers
from support.slow_registry import far
from support.waiting import Stopwatch, until
from support.workers import quick_settings

StartWorker = Callable[..., Worker]
QUICK = {"visibility_timeout": 2.0, "statement_timeout": 1.0, "cancel_grace": 0.5, "concurrency": 2}


@pytest.fixture
def import_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Children import until this file is there."""
    path = tmp_path / "gate"
    monkeypatch.setenv("SLOW_IMPORT_GATE", str(path))
    return path


def status(bus: CommandBus, command_id: str) -> str:
    record = bus.get_command("orders", command_id)
    assert record is not None
    return str(record.status)


def result(bus: CommandBus, command_id: str) -> Any:
    until(lambda: status(bus, command_id) == "COMPLETED", what=lambda: bus.get_attempts("orders", command_id))
    record = bus.get_command("orders", command_id)
    assert record is not None
    return record.result


def pids(worker: Worker) -> list[int]:
    assert worker._runtime is not None
    return worker._runtime._isolation.pids()


def start_waiting(bus: CommandBus, worker: Worker, **options: Any) -> str:
    """Send a command; its attempt waits for a process that is still importing."""
    sent = bus.send("orders", "slow", **options).command_id
    runtime = worker._runtime
    assert runtime is not None
    until(lambda: runtime.attempts.starting and pids(worker))
    return sent


@pytest.mark.parametrize(("registry", "kind"), [(slow_handlers, "slow"), (far, "far")])
def test_an_import_that_takes_longer_than_the_deadline_costs_no_attempt(
    bus: CommandBus,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    registry: HandlerRegistry,
    kind: str,
) -> None:
    monkeypatch.setenv("SLOW_IMPORT_SECONDS", "3")
    began = time.monotonic()
    start_worker(registry, **QUICK)
    sent = bus.send("orders", kind, timeout=1, max_attempts=1).command_id
    assert result(bus, sent)["attempt"] == 1
    assert time.monotonic() - began > 3
    assert bus.get_attempts("orders", sent).items == []  # nothing went wrong


def test_a_command_can_be_cancelled_while_it_waits_and_the_process_gets_warm(
    bus: CommandBus, start_worker: StartWorker, import_gate: Path
) -> None:
    worker = start_worker(slow_handlers, **QUICK | {"concurrency": 1})
    sent = start_waiting(bus, worker)
    before = pids(worker)
    bus.cancel("orders", sent, operator="ann", reason="enough")
    until(lambda: status(bus, sent) == "CANCELED")
    assert pids(worker) == before
    import_gate.touch()
    after = bus.send("orders", "slow").command_id
    assert [result(bus, after)["pid"]] == before


def test_a_stop_gives_back_what_waits(bus: CommandBus, start_worker: StartWorker, import_gate: Path) -> None:
    worker = start_worker(slow_handlers, **QUICK)
    sent = start_waiting(bus, worker, max_attempts=1)
    stopwatch = Stopwatch()
    report = worker.stop(wait=20)
    assert stopwatch.seconds() < 2
    assert report is not None
    assert (report.is_clean, report.given_back) == (True, 1)
    assert status(bus, sent) == "PENDING"
    import_gate.touch()
    start_worker(slow_handlers, **QUICK)
    assert result(bus, sent)
    assert [said.verdict for said in bus.get_attempts("orders", sent)] == ["GIVEN_BACK"]


def test_a_drain_gives_back_what_waits(bus: CommandBus, start_worker: StartWorker, import_gate: Path) -> None:
    worker = start_worker(slow_handlers, **QUICK)
    sent = start_waiting(bus, worker)
    worker.drain("enough")
    until(lambda: status(bus, sent) == "PENDING")
    worker.wait()
    verdicts = [said.verdict for said in bus.get_attempts("orders", sent)]
    assert set(verdicts) == {"GIVEN_BACK"}
    assert len(verdicts) <= 2  # a claim that was under way may take it once more


def test_a_lease_is_renewed_while_its_attempt_waits(
    bus: CommandBus, start_worker: StartWorker, import_gate: Path, db: psycopg.Connection[Any]
) -> None:
    worker = start_worker(slow_handlers, **QUICK)
    sent = start_waiting(bus, worker, max_attempts=1)
    runtime = worker._runtime
    assert runtime is not None
    (attempt,) = runtime.attempts.starting
    claimed_at = attempt.renewed_at
    until(lambda: attempt.renewed_at > claimed_at + QUICK["visibility_timeout"])
    import_gate.touch()
    assert result(bus, sent)["attempt"] == 1


def test_an_import_without_end_is_told_and_its_process_kept(
    bus: CommandBus,
    db: psycopg.Connection[Any],
    database: str,
    import_gate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(bus, db, quick_settings(database, concurrency=1), slow_handlers)
    lab.isolation.start()
    try:
        monkeypatch.setattr(children, "START_SECONDS", 3.0)
        until(Path(f"{import_gate}.reached").exists)
        attempt = lab.claim("slow")
        lab.settle(attempt, lab.run(attempt))
        said = lab.last(attempt)
        assert (said.error_type, said.error_code, said.verdict) == ("IsolationFailed", "ISOLATION_FAILED", "RETRY")
        assert "its child process was still importing support.slow_handlers after 3 s" in said.error
        assert "slow_handlers.py:" in said.error
        (pid,) = lab.isolation.pids()
        import_gate.touch()
        assert lab.result("slow")["pid"] == pid
    finally:
        lab.isolation.close(3)
    assert lab.isolation.pids() == []


def test_a_process_that_imports_far_too_long_is_replaced(
    bus: CommandBus,
    db: psycopg.Connection[Any],
    database: str,
    import_gate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children, "START_SECONDS", 0.2)
    monkeypatch.setattr(children, "LONGEST_IMPORT", 0.1)
    lab = Lab(bus, db, quick_settings(database, concurrency=1), slow_handlers)
    lab.isolation.start()
    try:
        (pid,) = until(lab.isolation.pids)
        lab.run(lab.claim("slow"))
        until(lambda: pid not in lab.isolation.pids())
        monkeypatch.setattr(children, "START_SECONDS", 60.0)
        import_gate.touch()
        assert lab.result("slow")["pid"] != pid
    finally:
        lab.isolation.close(3)
