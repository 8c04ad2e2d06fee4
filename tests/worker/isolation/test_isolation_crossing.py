"""isolation="process": what crosses over between a worker and the process that runs its handler."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import psycopg
import pytest

from commandbus.clock import boottime
from commandbus.worker.execution.attempt import Why
from support.isolating import Lab, MakeLab, Running
from support.waiting import Stopwatch, one, until


def effects(db: psycopg.Connection[Any]) -> list[str]:
    return [what for (what,) in db.execute("SELECT what FROM effects ORDER BY what")]


def test_it_runs_in_another_process_that_stays_warm(lab: Lab) -> None:
    first = lab.result("echo", {"a": [1, "é", None]})
    second = lab.result("echo")
    assert first == {"pid": first["pid"], "data": {"a": [1, "é", None]}, "attempt": 1, "worker": "test-worker"}
    assert first["pid"] != os.getpid()
    assert second["pid"] == first["pid"]


def test_an_async_handler_keeps_its_loop(lab: Lab) -> None:
    first, second = lab.result("echo_async", 1), lab.result("echo_async", 2)
    assert first["pid"] == second["pid"] != os.getpid()
    assert second["same_loop"] is True


def test_an_awaitable_that_a_sync_handler_returns_is_awaited_on_that_loop(lab: Lab) -> None:
    first, second = lab.result("echo_async", 1), lab.result("echo_returned", 2)
    assert (second["data"], second["pid"], second["same_loop"]) == (2, first["pid"], True)


def test_a_handler_without_a_result_completes(lab: Lab) -> None:
    assert lab.result("nothing") is None


def test_the_command_is_whole(lab: Lab, db: psycopg.Connection[Any]) -> None:
    said = lab.result("created")
    assert said == one(db, "SELECT created_at FROM commandbus.command").isoformat()


@pytest.mark.parametrize(
    ("kind", "status", "verdict", "error_type", "code", "text"),
    [
        ("business", "FAILED", "BUSINESS_RULE", "BusinessRuleException", "NO_STOCK", "no stock"),
        ("permanent", "IN_TROUBLESHOOTING_QUEUE", "PERMANENT", "PermanentCommandError", "NEVER", "never"),
        ("transient", "PENDING", "RETRY", "TransientCommandError", "LATER", "not now"),
        ("exit", "PENDING", "RETRY", "SystemExit", "ERROR", "3"),
        ("surrogate", "PENDING", "RETRY", "ValueError", "ERROR", "bad \\udc80 text \\x00"),
        ("other", "PENDING", "RETRY", "KeyError", "ERROR", "'gone'"),
    ],
)
def test_its_error_crosses_over(
    lab: Lab, kind: str, status: str, verdict: str, error_type: str, code: str, text: str
) -> None:
    attempt = lab.claim("raise", {"kind": kind})
    assert lab.settle(attempt, lab.run(attempt)) is None
    said = lab.last(attempt)
    assert (said.verdict, said.error_type, said.error_code, said.error) == (verdict, error_type, code, text)
    assert lab.status(attempt) == status
    assert said.details == ({"sku": 7} if kind == "business" else None)
    assert said.traceback.startswith("Traceback")
    assert "in raises" in said.traceback
    assert "isolated.py" not in said.traceback


@pytest.mark.parametrize(
    ("kind", "verdict", "seconds"),
    [
        ("snooze", "SNOOZED", 7200),
        ("retried", "RETRY", 3600),
        ("other", "EXHAUSTED", 0),
        ("hopeless", "EXHAUSTED", 0),
    ],
)
def test_what_its_retry_policy_says_crosses_over(lab: Lab, kind: str, verdict: str, seconds: int) -> None:
    attempt = lab.claim("ruled", kind)
    assert lab.settle(attempt, lab.run(attempt)) is None
    said = lab.last(attempt)
    waited = 0 if said.retry_at is None else round((said.retry_at - said.finished_at).total_seconds())
    assert (said.verdict, waited) == (verdict, seconds)


@pytest.mark.parametrize(("text", "written"), [("COMMIT AND CHAIN", ["committed"]), ("ROLLBACK", [])])
def test_a_handler_that_ends_its_transaction_is_found_out(
    lab: Lab, db: psycopg.Connection[Any], text: str, written: list[str]
) -> None:
    attempt = lab.claim("commits", text)
    lab.settle(attempt, lab.run(attempt))
    said = lab.last(attempt)
    assert (said.verdict, said.error_type, said.error_code) == (
        *("PERMANENT", "TransactionEndedError"),
        "TRANSACTION_ENDED",
    )
    assert lab.status(attempt) == "IN_TROUBLESHOOTING_QUEUE"
    assert effects(db) == written


def test_a_result_that_is_no_json_is_permanent(lab: Lab) -> None:
    attempt = lab.claim("not_json")
    lab.settle(attempt, lab.run(attempt))
    assert lab.last(attempt).error_code == "INVALID_RESULT"


def test_results_are_as_large_as_they_may_be(lab: Lab) -> None:
    assert lab.result("large", {"unit": '"\\', "times": 200_000}) == '"\\' * 200_000
    attempt = lab.claim("large", {"unit": "x", "times": 2_000_000})
    lab.settle(attempt, lab.run(attempt))
    assert lab.last(attempt).error_code == "INVALID_RESULT"


def test_commands_are_as_large_as_they_may_be(make_lab: MakeLab) -> None:
    data = "é" * 500_000
    assert make_lab().result("echo", data)["data"] == data


def test_log_records_become_the_workers_own(make_lab: MakeLab, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="commandbus.handler"):  # levels are those of when a child starts
        make_lab().result("log")
    first, second = [record for record in caplog.records if record.name == "commandbus.handler"]
    assert first.getMessage() == "hello from there"
    assert first.levelno == logging.INFO
    assert vars(first)["command_type"] == "log"
    assert first.process != os.getpid()
    assert first.funcName == "log"
    assert second.levelno == logging.ERROR
    assert second.getMessage() == "it broke"
    assert "OSError: broken" in (second.exc_text or "")


def test_heartbeat_crosses_over(lab: Lab) -> None:
    lab.result("progress")
    assert lab.progress == ['{"done":3}']


@pytest.mark.parametrize("command_type", ["extend", "extend_async"])
def test_extend_moves_the_deadline_on_both_sides(lab: Lab, command_type: str) -> None:
    attempt = lab.claim(command_type, {"seconds": 100}, task_timeout=30)  # its process must start within that
    before = attempt.deadline_at
    lab.settle(attempt, lab.run(attempt))
    record = lab.bus.get_command("orders", attempt.command_id)
    assert record is not None
    left_before, left_after = record.result
    assert left_before < 30.1
    assert 99 < left_after <= 100
    assert attempt.deadline_at - before > 65


def test_extend_of_a_lost_command_says_so(lab: Lab) -> None:
    lab.is_held = False
    attempt = lab.claim("extend", {"seconds": 100})
    lab.settle(attempt, lab.run(attempt))
    assert lab.last(attempt).error_type == "AttemptFencedError"
    assert attempt.is_lost


def test_a_clock_that_one_attempt_stopped_does_not_stop_the_timers_of_the_next(lab: Lab) -> None:
    first = lab.result("nap_async")
    assert lab.result("stop_clock") == first, "the same process"
    assert lab.result("nap_async", task_timeout=5) == first


def test_an_attempt_that_its_process_hears_of_too_late_is_not_started(make_lab: MakeLab) -> None:
    """Both were stopped, or their machine was suspended: whose the command is by now, nobody knows."""
    lab = make_lab(concurrency=1)
    late = lab.settings.timeouts.late_seconds
    pid = lab.result("echo")["pid"]
    attempt = lab.claim("echo")
    attempt.renewed_at = boottime() - late + 3
    os.kill(pid, signal.SIGSTOP)
    try:
        running = Running(lab, attempt)
        until(lambda: attempt.child is not None)
        until(lambda: not attempt.is_surely_held(late))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert running.settled() is None
    assert lab.last(attempt).verdict == "WAIVED"
    assert "lease" in lab.last(attempt).error
    assert lab.result("echo")["pid"] == pid, "and the process goes on"


def test_no_deadline_is_none(lab: Lab) -> None:
    assert lab.result("extend", {"seconds": 1}, task_timeout=float("inf")) == [None, None]


def test_its_connection_is_known_to_the_worker_and_closed_after_the_attempt(
    lab: Lab, db: psycopg.Connection[Any]
) -> None:
    pid, name = lab.result("write")
    assert name == "commandbus test-worker isolated"
    assert len(effects(db)) == 1
    until(lambda: one(db, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 0)


@pytest.mark.parametrize("command_type", ["transact", "transact_async", "option", "option_async"])
def test_a_transaction_commits_with_the_completion(
    lab: Lab, db: psycopg.Connection[Any], command_type: str
) -> None:
    attempt = lab.claim(command_type)
    assert lab.run(attempt) is None
    assert attempt.has_committed
    record = lab.bus.get_command("orders", attempt.command_id)
    assert record is not None
    assert (record.status, record.result) == ("COMPLETED", {"by": "tx"})
    assert effects(db) == [attempt.command_id]


def test_a_transaction_that_is_not_used_leaves_the_completion_to_the_worker(lab: Lab) -> None:
    assert lab.result("option_unused", {"n": 1}) == {"n": 1}


def test_a_transaction_of_a_lost_command_writes_nothing(lab: Lab, db: psycopg.Connection[Any]) -> None:
    attempt = lab.claim("transact")
    db.execute("UPDATE pgmq.q_orders__commands SET read_ct = read_ct + 1")
    ended = lab.run(attempt)
    assert effects(db) == []
    assert attempt.is_lost
    assert lab.settle(attempt, ended) == "refused"


def test_an_error_after_the_transaction_is_only_noted(lab: Lab) -> None:
    attempt = lab.claim("transact_and_raise")
    ended = lab.run(attempt)
    assert type(ended).__name__ == "Note"
    assert lab.status(attempt) == "COMPLETED"


def test_a_cancel_sets_the_event_and_a_result_within_the_grace_counts(lab: Lab) -> None:
    running = lab.start("wait")
    until(lambda: running.attempt.child is not None and running.attempt.child.has_begun)
    running.ask_to_stop(grace=10)
    assert running.settled() is None
    record = lab.bus.get_command("orders", running.attempt.command_id)
    assert record is not None
    assert record.result == "canceled"


@pytest.mark.parametrize("command_type", ["sleep", "sleep_async", "sleep_in_sql"])
@pytest.mark.parametrize(
    ("why", "status", "verdict", "code"),
    [
        (Why.DEADLINE, "PENDING", "RETRY", "TIMEOUT"),
        (Why.CANCEL, "CANCELED", "CANCELED", "CANCELED"),
        (Why.SHUTDOWN, "PENDING", "WAIVED", "SHUTDOWN"),
    ],
)
def test_a_cancel_ends_what_can_be_interrupted(
    lab: Lab, db: psycopg.Connection[Any], command_type: str, why: Why, status: str, verdict: str, code: str
) -> None:
    running = lab.start(command_type)
    attempt = running.attempt
    until(lambda: attempt.child is not None and attempt.child.has_begun)
    if command_type == "sleep_in_sql":
        until(
            lambda: one(
                db,
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND query = 'SELECT pg_sleep(1000)'",
            )
        )
    running.ask_to_stop(why, grace=10, text="please")
    if attempt.borrowed is not None:
        db.execute("SELECT pg_cancel_backend(%s)", (attempt.borrowed.pid,))
    assert running.settled() is None
    said = lab.last(attempt)
    assert (said.verdict, said.error_code, said.error) == (verdict, code, "please")
    assert lab.status(attempt) == status
    pid = lab.isolation.pids()
    assert lab.result("echo")["pid"] in pid  # the process is as good as new


def test_a_cancel_before_it_began_is_told(make_lab: MakeLab) -> None:
    lab = make_lab()
    running = lab.start("sleep")
    until(lambda: running.attempt.child is not None)
    running.ask_to_stop(grace=10)
    assert running.settled() is None
    assert lab.last(running.attempt).error_code == "TIMEOUT"


def test_the_deadline_of_a_child_context_wakes_who_waits_for_it(lab: Lab) -> None:
    lab.result("echo")  # its process has started
    stopwatch = Stopwatch()
    assert lab.result("scope") is True
    assert stopwatch.seconds() < 5


def test_suspects_run_isolated_whatever_their_handler_says(lab: Lab, db: psycopg.Connection[Any]) -> None:
    attempt = lab.claim("thread")
    assert not lab.isolation.wants(attempt)
    attempt.row = (*attempt.row[:19], True, *attempt.row[20:])
    assert lab.isolation.wants(attempt)
    lab.settle(attempt, lab.run(attempt))
    record = lab.bus.get_command("orders", attempt.command_id)
    assert record is not None
    assert record.result != os.getpid()
