"""The zoo: every way to hang or crash that we know, against a supervised worker of four slots with short limits.

For each animal, as a poison message that does it at every attempt: healthy commands before and after it finish and
are not charged, full capacity is back in time, the history names the cause, nothing of it lands later, and after its
last attempt it is in the troubleshooting queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from fleet import GRACE, SLOTS, TASK_TIMEOUT, Fleet
from zoo_handlers import USES_THE_CONNECTION

from commandbus import TroubleshootingQueue
from commandbus.testing import hang

TSQ, COMPLETED = "IN_TROUBLESHOOTING_QUEUE", "COMPLETED"
MARGIN = 2.0
NOT_CHARGED = {"WAIVED", "GIVEN_BACK"}


@dataclass(frozen=True)
class Expected:
    """The last charged attempt: error_type, error_code, rung, and words of its text; and what becomes of the command.

    `may_be_suspect`: if others ran at that moment nobody can be named, and it is convicted in a process of its own.
    """

    error_type: str = ""
    code: str = ""
    rung: str | None = None
    words: tuple[str, ...] = ()
    status: str = TSQ
    data: dict[str, Any] | None = None
    stack: str = ""


STUCK_WORDS = ("did not respond to cancellation within 0.5 seconds", "task_timeout")


def stuck(stack: str, data: dict[str, Any] | None = None) -> Expected:
    return Expected("ExecutionStuck", "EXECUTION_STUCK", "stuck", STUCK_WORDS, data=data, stack=stack)


def killed(stack: str = "", words: tuple[str, ...] = ("its process was killed",), **more: Any) -> Expected:
    return Expected("ExecutionStuck", "EXECUTION_STUCK", "kill", words, stack=stack, **more)


DEADLINE = Expected("DeadlineExceededError", "TIMEOUT", "deadline", ("deadline of 1s", "layer 4: task_timeout"))
DONE = Expected(status=COMPLETED)
HOG = {"mb": 600}

IN_THREADS = {
    "spin": stuck("in spin"),
    "sleep": stuck("in sleep"),
    "swallow": stuck("in swallow"),
    "regex": killed(words=("the worker process froze", "CPU time")),
    "recv": stuck("in recv"),
    "double_lock": stuck("in double_lock"),
    "hostile_error": stuck("in __str__"),
    "pg_sleep": DEADLINE,
    "own_pg_sleep": stuck("in own_pg_sleep"),
    "row_lock": DEADLINE,
    "change_session": DEADLINE,
    "commit_by_hand": DEADLINE,
    "close_connection": DONE,
    "segfault": Expected("WorkerLost", "WORKER_LOST", "crash", ("SIGSEGV",), stack="string_at"),
    "exit": Expected("WorkerLost", "WORKER_LOST", "crash", ("exit code 1",)),
    "kill": Expected("WorkerLost", "WORKER_LOST", "crash", ("SIGKILL",)),
    "stop": killed(),
    "hog": Expected("MemoryLimitExceeded", "MEMORY_LIMIT", "kill", ("200 MB",), data=HOG),
    "fork": stuck("in fork"),
    "fork_return": DONE,
    "block_loop": stuck("in block_loop"),
    "swallow_cancel": stuck("in swallow_cancel"),
    "sys_exit": Expected("SystemExit", "SystemExit", None, ("wants to leave",)),
    "leave_thread": DONE,
    "pollute": DONE,
}

IN_PROCESSES = {
    "spin": killed("in spin"),
    "sleep": killed("in sleep"),
    "swallow": killed("in swallow"),
    "regex": killed("in regex"),
    "recv": killed("in recv"),
    "double_lock": killed("in double_lock"),
    "hostile_error": killed("in __str__"),
    "pg_sleep": DEADLINE,
    "own_pg_sleep": killed("in own_pg_sleep"),
    "row_lock": DEADLINE,
    "change_session": DEADLINE,
    "commit_by_hand": DEADLINE,
    "close_connection": DONE,
    "segfault": IN_THREADS["segfault"],
    "exit": IN_THREADS["exit"],
    "kill": IN_THREADS["kill"],
    "stop": killed(),
    "hog": IN_THREADS["hog"],
    "fork": killed("in fork"),
    "fork_return": DONE,
    "block_loop": killed("in block_loop"),
    "swallow_cancel": killed("in swallow_cancel"),
    "sys_exit": IN_THREADS["sys_exit"],
    "leave_thread": DONE,
    "pollute": DONE,
}


@contextmanager
def held_row(url: str) -> Iterator[None]:
    """Another session holds the row that `row_lock` wants."""
    with psycopg.connect(url) as holder:
        holder.execute("SELECT FROM locked WHERE id = 1 FOR UPDATE")
        yield


def data_for(fleet: Fleet, expected: Expected) -> dict[str, Any]:
    """Its own limits, and an address whose server ends the query of a client that is gone."""
    url = f"{fleet.url}?options=-c%20client_connection_check_interval%3D200ms"
    return {"database_url": url, "table": "locked", "id": 1, "seconds": 60} | (expected.data or {})


def check_outcome(fleet: Fleet, command_id: str, expected: Expected) -> None:
    """The history names the cause, attempt by attempt."""
    history = fleet.attempts(command_id)
    charged = [attempt for attempt in history if attempt.verdict not in NOT_CHARGED]
    if expected.status == COMPLETED:
        assert charged == []
        return
    assert [attempt.verdict for attempt in charged] == ["RETRY", "EXHAUSTED"], history
    for attempt in charged:
        found = (attempt.error_type, attempt.code, attempt.rung)
        assert found == (expected.error_type, expected.code, expected.rung), attempt
        assert all(word in attempt.error for word in expected.words), attempt.error
    if expected.stack:
        assert expected.stack in str(charged[-1].autopsy), charged[-1].autopsy
    (entry,) = [entry for entry in TroubleshootingQueue(fleet.bus).list("zoo") if entry.command_id == command_id]
    assert entry.error_code == expected.code
    # A suspect is waived once for every crash that nobody could be named for, and then runs alone.
    assert len(history) - len(charged) <= 3, history


def check_marks(fleet: Fleet, command_id: str, expected: Expected) -> None:
    """Nothing of an attempt is there that was written after its end; of a transaction only what completed."""
    late = fleet.db.execute(
        "SELECT m.* FROM marker m JOIN commandbus.command c USING (command_id) "
        "LEFT JOIN commandbus.attempt a ON a.command = c.id AND a.number = m.attempt "
        "WHERE command_id = %s AND (m.at > a.finished_at OR m.place = 'inside' AND "
        "(c.status <> 'COMPLETED' OR m.attempt <> c.attempt) OR m.place = 'after' AND a.rung = 'stuck')",
        (command_id,),
    ).fetchall()
    assert late == []


def run_through(fleet: Fleet, kind: str, expected: Expected) -> None:
    """Healthy commands, the animal, healthy commands; then everything that must be true."""
    name = kind.partition(".")[2]
    before = fleet.send_healthy()
    command_id = fleet.send(kind, data_for(fleet, expected), max_attempts=2)
    after = fleet.send_healthy()
    fleet.until_status([command_id], {expected.status}, 25)
    last = fleet.attempts(command_id)
    if last:  # when was the whole capacity back, counted from its last attempt's start?
        allowed = TASK_TIMEOUT + GRACE + MARGIN + fleet.start_seconds
        back_at = fleet.meet_at_once(10)
        assert back_at - last[-1].started_at < allowed, f"{back_at - last[-1].started_at:.2f} s, not {allowed:.2f}"
    else:
        fleet.meet_at_once(MARGIN)
    fleet.until_status(before + after, {COMPLETED}, 10)
    verdicts = {row[2] for row in fleet.history(before + after)}
    assert verdicts <= NOT_CHARGED, fleet.history(before + after)
    check_outcome(fleet, command_id, expected)
    check_marks(fleet, command_id, expected)
    assert name in USES_THE_CONNECTION or expected.status != COMPLETED or marks(fleet, command_id) == ["inside"]


def marks(fleet: Fleet, command_id: str) -> list[str]:
    rows = fleet.db.execute("SELECT place FROM marker WHERE command_id = %s AND place = 'inside'", (command_id,))
    return [row[0] for row in rows]


@pytest.mark.parametrize("name", hang.ANIMALS)
def test_a_poison_message_harms_nobody_else(fleet: Fleet, name: str) -> None:
    """Every animal in a thread of a supervised worker; one without an expectation fails here."""
    with held_row(fleet.url):
        run_through(fleet, f"hang.{name}", IN_THREADS[name])


@pytest.mark.parametrize("name", hang.ANIMALS)
def test_in_a_process_of_its_own_it_does_not_even_drain_the_worker(fleet: Fleet, name: str) -> None:
    """The same with isolation="process": killed at deadline + grace, and the worker goes on."""
    fleet.meet_at_once(10)
    workers = settled_workers(fleet)
    with held_row(fleet.url):
        run_through(fleet, f"isolated.{name}", IN_PROCESSES[name])
    assert fleet.workers() == workers


def settled_workers(fleet: Fleet) -> list[int]:
    """The workers, when no old one drains any more."""
    from support.waiting import until

    return until(lambda: len(found := fleet.workers()) == 1 and found, 10)
