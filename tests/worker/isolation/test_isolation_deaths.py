"""isolation="process": a handler that hangs is killed, one that kills its process is named."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psycopg
import pytest

from commandbus.worker.execution.attempt import Why
from support.isolating import Lab, MakeLab, Running
from support.waiting import one, until


def begun(running: Running) -> None:
    child = until(lambda: running.attempt.child)
    until(lambda: child.has_begun)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("how", ["spin", "sleep", "swallow", "regex", "lock", "recv", "ignore", "stop"])
def test_a_hanging_handler_is_killed_with_its_stack(lab: Lab, how: str) -> None:
    running = lab.start("hang", {"how": how})
    until(lambda: lab.progress)  # it has begun, and is in the handler
    pid = running.attempt.child.pid if running.attempt.child else 0
    running.ask_to_stop(grace=0.1, text="the deadline of 1s has passed")
    started = time.monotonic()
    ended = running.kill()
    took = time.monotonic() - started
    assert lab.settle(running.attempt, ended) is None
    said = lab.last(running.attempt)
    assert (said.verdict, said.error_type, said.error_code) == ("RETRY", "ExecutionStuck", "EXECUTION_STUCK")
    assert said.rung == "kill"
    assert said.error == (
        "did not respond to cancellation within 0.1 seconds: the deadline of 1s has passed; its process was killed"
    )
    assert said.duration_ms > 0
    assert took < 1.5
    assert not is_alive(pid)
    frames = [frame for stack in said.autopsy["stacks"] for frame in stack["frames"]]
    if how not in ("ignore", "stop"):  # neither can say where it is
        assert any("isolated_handlers.py" in frame and "in hang" in frame for frame in frames)
    assert said.autopsy["process"]["signal"] == "SIGKILL"
    assert lab.result("echo")["pid"] != pid


def test_an_async_handler_that_swallows_its_cancel_is_killed(lab: Lab) -> None:
    running = lab.start("swallow_async")
    until(lambda: lab.progress)  # it has begun, and is in the handler
    running.ask_to_stop(grace=0.1)
    lab.settle(running.attempt, running.kill())
    assert lab.last(running.attempt).error_type == "ExecutionStuck"


@pytest.mark.parametrize(
    ("why", "verdict", "status"), [(Why.CANCEL, "CANCELED", "CANCELED"), (Why.SHUTDOWN, "WAIVED", "PENDING")]
)
def test_who_asked_decides_what_a_kill_means(lab: Lab, why: Why, verdict: str, status: str) -> None:
    running = lab.start("hang", {"how": "sleep"})
    begun(running)
    running.ask_to_stop(why, grace=0.1)
    lab.settle(running.attempt, running.kill())
    assert lab.last(running.attempt).verdict == verdict
    assert lab.status(running.attempt) == status


def test_after_max_attempts_it_is_in_the_troubleshooting_queue(lab: Lab) -> None:
    attempt = lab.claim("die", {"how": "exit"})
    for _ in range(2):
        lab.settle(attempt, lab.run(attempt))
        attempt = lab.claim_again(attempt.command_id)
    lab.settle(attempt, lab.run(attempt))
    assert lab.last(attempt).verdict == "EXHAUSTED"
    assert lab.status(attempt) == "IN_TROUBLESHOOTING_QUEUE"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("segv", "its process died of SIGSEGV"),
        ("abort", "its process died of SIGABRT"),
        ("kill", "its process died of SIGKILL (out of memory, or somebody killed it)"),
        ("exit", "its process ended with exit code 1"),
        ("exec", "its process ended with exit code 0"),
        ("closed", "its process was killed: it closed its connection to the worker"),
    ],
)
def test_a_handler_that_kills_its_process_is_named(lab: Lab, how: str, text: str) -> None:
    attempt = lab.claim("die", {"how": how})
    assert lab.settle(attempt, lab.run(attempt)) is None
    said = lab.last(attempt)
    assert (said.verdict, said.error_type, said.error_code) == ("RETRY", "WorkerLost", "WORKER_LOST")
    assert said.error == text
    assert said.rung == ("kill" if how == "closed" else "crash")
    if how in ("segv", "abort"):
        assert "Fatal Python error" in said.autopsy["process"]["dump"]
        assert "in die" in str(said.autopsy["stacks"])
    assert lab.result("echo")


def test_memory_beyond_the_limit_kills_it(make_lab: MakeLab) -> None:
    lab = make_lab(max_memory_mb=150)
    running = lab.start("hog")
    begun(running)

    def is_over() -> bool:
        assert running.attempt.child is not None
        running.attempt.child.check_memory()
        return not running.is_running

    until(is_over)
    running.settled()
    said = lab.last(running.attempt)
    assert (said.verdict, said.error_type, said.error_code) == ("RETRY", "MemoryLimitExceeded", "MEMORY_LIMIT")
    assert "more than max_memory_mb (150)" in said.error
    assert "in hog" in str(said.autopsy["stacks"])


def test_a_process_that_an_attempt_left_large_is_not_used_again(make_lab: MakeLab) -> None:
    lab = make_lab(max_memory_mb=200)
    large = lab.result("grow", {"mb": 140})
    assert lab.result("echo")["pid"] != large
    until(lambda: large not in lab.isolation.pids())


def die_with_query(lab: Lab) -> Running:
    """Start a handler, and kill its process while it waits for a query."""
    running = lab.start("sleep_in_sql")
    until(
        lambda: one(
            lab.db,
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query = 'SELECT pg_sleep(1000)'",
        )
    )
    assert running.attempt.child is not None
    os.kill(running.attempt.child.pid, signal.SIGKILL)
    return running


def test_the_backend_is_ended_before_the_outcome_is_known(lab: Lab, db: psycopg.Connection[Any]) -> None:
    running = die_with_query(lab)
    ended = running.ended()
    assert len(lab.terminated) == 1
    assert (
        one(
            db,
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE '%% isolated'",
        )
        == 0
    )
    assert running.attempt.borrowed is None
    lab.settle(running.attempt, ended)
    assert one(db, "SELECT count(*) FROM effects") == 0


def test_a_query_that_hangs_is_ended_with_its_process(lab: Lab, db: psycopg.Connection[Any]) -> None:
    running = lab.start("sleep_in_sql")
    until(
        lambda: one(
            db,
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query = 'SELECT pg_sleep(1000)'",
        )
    )
    running.ask_to_stop(grace=0.1)
    running.kill()
    assert (
        one(
            db,
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query = 'SELECT pg_sleep(1000)'",
        )
        == 0
    )
    assert one(db, "SELECT count(*) FROM effects") == 0


def test_a_terminate_that_fails_costs_no_outcome(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(borrowed: Any) -> None:
        raise OSError("no database")

    monkeypatch.setattr(lab.isolation, "_terminate", fail)
    running = die_with_query(lab)
    assert running.settled() is None
    assert lab.last(running.attempt).error_type == "WorkerLost"


def test_a_fork_has_no_part_in_the_conversation(lab: Lab) -> None:
    assert lab.result("fork") == "the original"
    assert lab.result("echo")


def test_what_is_forked_off_does_not_keep_a_dead_child_alive(lab: Lab) -> None:
    forked = lab.result("fork_and_stay")
    assert is_alive(forked)
    attempt = lab.claim("die", {"how": "kill"})
    lab.run(attempt)
    until(lambda: not is_alive(forked) or _is_zombie(forked))


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_next_handler_finds_its_surroundings_as_they_were(make_lab: MakeLab) -> None:
    """Thread-locals stay, unless a handler asks for a fresh thread."""
    lab = make_lab(concurrency=1)
    umask = os.umask(0)
    os.umask(umask)
    lab.result("change")
    assert lab.result("surroundings") == [os.getcwd(), umask, True, 0.0, True]
    assert lab.result("fresh_surroundings") == [os.getcwd(), umask, True, 0.0, False]


def test_a_fresh_thread_in_a_child_process(make_lab: MakeLab, db: psycopg.Connection[Any]) -> None:
    lab = make_lab(concurrency=1)
    assert [lab.result("fresh"), lab.result("fresh")] == [[None, False], [None, False]]
    assert db.execute("SELECT count(*) FROM effects WHERE what = 'fresh'").fetchone() == (2,)
    attempt = lab.claim("fresh", "raise")
    lab.settle(attempt, lab.run(attempt))
    said = lab.last(attempt)
    assert (said.verdict, said.error) == ("PERMANENT", "from a fresh thread")
    assert "in fresh" in said.traceback
    assert "fresh_thread.py" not in said.traceback


def test_a_thread_left_behind_gets_no_connection_and_says_nothing(
    make_lab: MakeLab, db: psycopg.Connection[Any]
) -> None:
    lab = make_lab(concurrency=1)
    lab.result("leave_thread")
    assert lab.result("what_was_late") == "AttemptFencedError"
    before = len(lab.progress)
    lab.result("what_was_late")
    assert len(lab.progress) == before
    assert one(db, "SELECT count(*) FROM effects") <= 1  # what it did while the attempt still ran


@pytest.mark.parametrize("what", ["garbage", "huge", "shape", "unknown"])
def test_a_child_that_talks_nonsense_is_killed(make_lab: MakeLab, what: str) -> None:
    lab = make_lab(concurrency=1)
    attempt = lab.claim("lie", {"what": what})
    lab.settle(attempt, lab.run(attempt))
    said = lab.last(attempt)
    assert said.error_type == "WorkerLost"
    assert "it sent a message that makes no sense" in said.error
    assert lab.result("echo")


def test_a_child_cannot_settle_anything_but_its_own_command(make_lab: MakeLab) -> None:
    lab = make_lab(concurrency=1)
    attempt = lab.claim("lie", {"what": "result"})
    lab.settle(attempt, lab.run(attempt))
    said = lab.last(attempt)
    assert said.error_code == "ISOLATION_FAILED"
    assert "makes no sense" in said.error


def test_a_child_cannot_extend_beyond_the_limit(make_lab: MakeLab) -> None:
    lab = make_lab(concurrency=1)
    attempt = lab.claim("lie", {"what": "extend"}, task_timeout=60)
    deadline = attempt.deadline_at
    lab.settle(attempt, lab.run(attempt))
    record = lab.bus.get_command("orders", attempt.command_id)
    assert record is not None
    assert "is more than max_extension" in record.result
    assert attempt.deadline_at == deadline


def test_ladder_calls_after_the_end_do_nothing(make_lab: MakeLab) -> None:
    lab = make_lab(concurrency=1)
    attempt = lab.claim("echo")
    lab.settle(attempt, lab.run(attempt))
    child = attempt.child
    assert child is not None
    child.kill("late")
    child.kill("late")
    assert lab.result("echo")["pid"] == child.pid


def test_a_child_that_died_idle_costs_no_attempt(make_lab: MakeLab) -> None:
    lab = make_lab(concurrency=1)
    pid = lab.result("echo")["pid"]
    os.kill(pid, signal.SIGKILL)
    assert lab.result("echo")["pid"] != pid
