"""The zoo: every way to hang or crash that we know, against a supervised worker of four slots with short limits.

For each animal, as a poison message that does it at every attempt: healthy commands before and after it finish
and are not charged, full capacity is back in time, the history names the cause, nothing of it lands later, and
after its last attempt it is in the troubleshooting queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from zoo_handlers import USES_THE_CONNECTION

from commandbus.testing import hang
from fleet import GRACE, SLOTS, TASK_TIMEOUT, Fleet, late_marks
from support.waiting import until
from support.workers import BUSY

pytestmark = pytest.mark.shared_setup
TSQ, COMPLETED = "IN_TROUBLESHOOTING_QUEUE", "COMPLETED"
MARGIN = 5.0  # far above what a busy machine needs, far below the minute that they hang
NOT_CHARGED = {"WAIVED", "GIVEN_BACK"}


@dataclass(frozen=True)
class Expected:
    """Its charged attempts: error_type, error_code, rung, words of their text, a word of the last autopsy's stack;
    what becomes of the command; and its own timeout, if a second is too short for it."""

    error_type: str = ""
    code: str = ""
    rung: str | None = None
    words: tuple[str, ...] = ()
    status: str = TSQ
    data: dict[str, Any] | None = None
    stack: str = ""
    timeout: float | None = None


STUCK_WORDS = ("did not respond to cancellation within 0.5 seconds", "task_timeout")


def stuck(stack: str, data: dict[str, Any] | None = None) -> Expected:
    return Expected("ExecutionStuck", "EXECUTION_STUCK", "stuck", STUCK_WORDS, data=data, stack=stack)


def killed(stack: str = "", words: tuple[str, ...] = ("its process was killed",), **more: Any) -> Expected:
    return Expected("ExecutionStuck", "EXECUTION_STUCK", "kill", words, stack=stack, **more)


DEADLINE = Expected("DeadlineExceededError", "TIMEOUT", "deadline", ("deadline of 1s", "layer 4: task_timeout"))
DONE = Expected(status=COMPLETED)
HOG = {"mb": 600}
HOG_TIMEOUT = 15.0  # a busy machine needs more than a second to give it so much

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
    "close_connection": DONE,
    "segfault": Expected("WorkerLost", "WORKER_LOST", "crash", ("SIGSEGV",), stack="string_at"),
    "exit": Expected("WorkerLost", "WORKER_LOST", "crash", ("exit code 1",)),
    "kill": Expected("WorkerLost", "WORKER_LOST", "crash", ("SIGKILL",)),
    "stop": killed(),
    "hog": Expected(
        "MemoryLimitExceeded", "MEMORY_LIMIT", "kill", ("max_memory_mb (200)",), data=HOG, timeout=HOG_TIMEOUT
    ),
    "fork": stuck("in fork"),
    "fork_return": DONE,
    "block_loop": stuck("in block_loop"),
    "swallow_cancel": stuck("in swallow_cancel"),
    "sys_exit": Expected("SystemExit", "ERROR", None, ("wants to leave",)),
    "leave_thread": Expected(status=COMPLETED, data={"connection": True}),
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
    "close_connection": DONE,
    "segfault": IN_THREADS["segfault"],
    "exit": IN_THREADS["exit"],
    "kill": IN_THREADS["kill"],
    "stop": killed(),
    "hog": IN_THREADS["hog"],
    "fork": killed("in fork"),
    "fork_return": DONE,
    "block_loop": killed("in block_loop"),
    "swallow_cancel": killed(),
    "sys_exit": IN_THREADS["sys_exit"],
    "leave_thread": Expected(status=COMPLETED, data={"connection": True}),
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


def check_outcome(fleet: Fleet, command_id: str, expected: Expected, later: Expected | None = None) -> None:
    """The history names the cause, attempt by attempt. `later`: of attempts in quarantine, or of suspects."""
    history = fleet.attempts(command_id)
    charged = [attempt for attempt in history if attempt.verdict not in NOT_CHARGED]
    if expected.status == COMPLETED:
        assert charged == []
        return
    # A suspect that is convicted pays for the crash that was waived: both of its two attempts are used up.
    was_suspect = any(attempt.verdict == "WAIVED" and "may have caused it" in attempt.error for attempt in history)
    fates = [["RETRY", "EXHAUSTED"], *([["EXHAUSTED"]] if was_suspect else [])]
    assert [attempt.verdict for attempt in charged] in fates, history
    for attempt in charged:
        if attempt is not history[0]:
            expected = later or expected
        found = (attempt.error_type, attempt.code, attempt.rung)
        assert found == (expected.error_type, expected.code, expected.rung), attempt
        assert all(word in attempt.error for word in expected.words), attempt.error
    if expected.stack:
        assert expected.stack in str(charged[-1].autopsy), charged[-1].autopsy
    entry = fleet.db.execute(
        "SELECT t.error_code FROM commandbus.tsq t JOIN commandbus.command c ON c.id = t.command "
        "WHERE c.command_id = %s",
        (command_id,),
    ).fetchone()
    assert entry == (expected.code,)
    # A suspect is waived once for every crash that nobody could be named for, and then runs isolated.
    assert sum(attempt.verdict == "WAIVED" for attempt in history) <= 3, history


def run_through(fleet: Fleet, kind: str, expected: Expected, later: Expected) -> None:
    """Healthy commands, the animal, healthy commands; then everything that must be true."""
    name = kind.partition(".")[2]
    before = fleet.send_healthy()
    command_id = fleet.send(kind, data_for(fleet, expected), max_attempts=2, timeout=expected.timeout)
    after = fleet.send_healthy()
    fleet.until_status([command_id], {expected.status}, 25)
    last = fleet.attempts(command_id)
    if last:  # when was the whole capacity back, counted from its last attempt's start?
        allowed = (expected.timeout or TASK_TIMEOUT) + GRACE + MARGIN + fleet.start_seconds
        back_at = fleet.meet_at_once(10)
        assert back_at - last[-1].started_at < allowed, f"{back_at - last[-1].started_at:.2f} s, not {allowed:.2f}"
    else:
        fleet.meet_at_once(MARGIN)
    fleet.until_status(before + after, {COMPLETED}, 10)
    verdicts = {row[2] for row in fleet.history(before + after)}
    assert verdicts <= NOT_CHARGED, fleet.history(before + after)
    check_outcome(fleet, command_id, expected, later)
    assert late_marks(fleet.db, command_id) == []
    assert name in USES_THE_CONNECTION or expected.status != COMPLETED or marks(fleet, command_id) == ["inside"]


def marks(fleet: Fleet, command_id: str) -> list[str]:
    rows = fleet.db.execute("SELECT place FROM marker WHERE command_id = %s AND place = 'inside'", (command_id,))
    return [row[0] for row in rows]


@pytest.mark.parametrize("name", hang.ANIMALS)
def test_a_poison_message_harms_nobody_else(fleet: Fleet, name: str) -> None:
    """Every animal in a thread of a supervised worker, then in quarantine; one without an expectation fails."""
    with held_row(fleet.url):
        run_through(fleet, f"hang.{name}", IN_THREADS[name], IN_PROCESSES[name])


@dataclass(frozen=True)
class Isolated:
    """All animals in processes of their own, four at a time, with healthy commands between them."""

    commands: dict[str, str]
    healthy: list[str]
    workers_before: list[int]
    workers_after: list[int]


@pytest.fixture(scope="module")
def isolated(fleet: Fleet) -> Isolated:
    """They hang together, since none of them disturbs the worker."""
    fleet.meet_at_once(10)
    before = settled_workers(fleet)
    commands, healthy = {}, []
    with held_row(fleet.url):
        for name in hang.ANIMALS:
            expected = IN_PROCESSES[name]
            data = data_for(fleet, expected)
            commands[name] = fleet.send(f"isolated.{name}", data, max_attempts=2, timeout=expected.timeout)
            healthy += fleet.send_healthy(10)
        fleet.until_status([*commands.values(), *healthy], {TSQ, COMPLETED}, 60)
    fleet.meet_at_once(MARGIN)
    return Isolated(commands, healthy, before, fleet.workers())


@pytest.mark.parametrize("name", hang.ANIMALS)
def test_in_a_process_of_its_own(fleet: Fleet, isolated: Isolated, name: str) -> None:
    """isolation="process": killed at deadline + grace."""
    command_id, expected = isolated.commands[name], IN_PROCESSES[name]
    assert fleet.statuses([command_id]) == {command_id: expected.status}
    check_outcome(fleet, command_id, expected)
    assert late_marks(fleet.db, command_id) == []
    for attempt in [attempt for attempt in fleet.attempts(command_id) if attempt.started_at]:
        assert attempt.finished_at - attempt.started_at < (expected.timeout or TASK_TIMEOUT) + GRACE + MARGIN


def test_in_a_process_of_its_own_it_does_not_even_drain_the_worker(fleet: Fleet, isolated: Isolated) -> None:
    """The worker goes on, and nobody else notices anything."""
    assert isolated.workers_after == isolated.workers_before
    assert set(fleet.statuses(isolated.healthy).values()) == {COMPLETED}
    # The hanging ones fill its slots, so what it has prefetched may go back. Nothing else happens to them.
    assert {row[-1] for row in fleet.history(isolated.healthy)} <= {BUSY}


def test_all_slots_stuck_at_once(fleet: Fleet) -> None:
    """Every slot hangs, twice over: the fleet comes back, and the healthy commands behind them are done."""
    ids = [fleet.send("hang.sleep", {"seconds": 60}, max_attempts=2) for _ in range(SLOTS)]
    for command_id in ids:
        fleet.meeting.until_seen(command_id)
    after = fleet.send_healthy()
    fleet.until_status(ids, {TSQ}, 25)
    started_at = max(fleet.attempts(command_id)[-1].started_at for command_id in ids)
    allowed = TASK_TIMEOUT + GRACE + MARGIN + fleet.start_seconds
    assert fleet.meet_at_once(10) - started_at < allowed
    fleet.until_status(after, {COMPLETED}, 10)
    for command_id in ids:
        check_outcome(fleet, command_id, IN_THREADS["sleep"], IN_PROCESSES["sleep"])


def test_all_slots_in_frozen_workers_at_once(fleet: Fleet) -> None:
    """Handlers that hold the GIL in every slot: it is killed as often as it takes, nobody else is charged."""
    ids = [fleet.send("hang.regex", max_attempts=1) for _ in range(SLOTS)]
    after = fleet.send_healthy()
    fleet.until_status(ids, {TSQ}, 40)
    fleet.until_status(after, {COMPLETED}, 15)
    # The lease of one that waited in a frozen worker may end before that is killed: the next worker finds it lost.
    history = fleet.history(after)
    assert [row for row in history if row[2] not in NOT_CHARGED and "not charged" not in (row[5] or "")] == []
    fleet.meet_at_once(10)


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("pg_sleep", {}, Expected("QueryCanceled", "TIMEOUT", "statement", ("layer 1: statement_timeout",))),
        ("row_lock", {}, Expected("LockNotAvailable", "LOCK_TIMEOUT", "lock", ("layer 1: lock_timeout",))),
        (
            "close_connection",
            {"transaction": True},
            Expected("TransientCommandError", "COMMIT_LOST", None, ("was not committed",)),
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["hang.", "isolated."])
def test_with_a_later_deadline_the_lower_layers_stop_it(
    fleet: Fleet, prefix: str, kind: str, data: dict[str, Any], expected: Expected
) -> None:
    """The command's own deadline is far away: layer 1 ends what is in the database."""
    with held_row(fleet.url):
        command_id = fleet.send(prefix + kind, data_for(fleet, expected) | data, max_attempts=2, timeout=30)
        fleet.until_status([command_id], {TSQ}, 15)
    check_outcome(fleet, command_id, expected)


def milliseconds(setting: str) -> float:
    """What SHOW says of a time-out: in seconds if they are whole."""
    return float(setting.removesuffix("ms")) if setting.endswith("ms") else 1000 * float(setting.removesuffix("s"))


def test_a_changed_session_is_not_the_next_handlers(fleet: Fleet) -> None:
    """After handlers that changed everything and took advisory locks, all connections are as new."""
    ids = [
        fleet.send("hang.change_session", {"seconds": 60, "lock": lock}, max_attempts=1) for lock in range(SLOTS)
    ]
    fleet.until_status(ids, {TSQ}, 15)
    after = fleet.send_healthy(12, "work_with_connection")
    fleet.until_status(after, {COMPLETED})
    rows = fleet.db.execute(
        "SELECT result FROM commandbus.command WHERE command_id = ANY(%s)", (after,)
    ).fetchall()
    for (result,) in rows:
        least, most = (1000 * (float(result[when]) + GRACE) for when in ("left_after", "left_before"))
        assert least - 1 <= milliseconds(result["statement_timeout"]) <= most, result  # what remained then
        assert (result["search_path"], result["advisory_locks"]) == ('"$user", public', "0")
        assert result["application_name"].startswith("commandbus ")


def test_a_session_of_another_name_ends_with_its_worker(fleet: Fleet) -> None:
    """A handler has renamed its session and switched its limits off when a neighbour takes the worker along."""

    def renamed_sessions() -> list[str]:
        return [name for name, _ in fleet.sessions() if name.startswith("hang.")]

    for _ in range(3):
        renamed = fleet.send("hang.change_session", {"seconds": 60}, max_attempts=1, timeout=3)
        until(renamed_sessions)
        crash = fleet.send("hang.kill", max_attempts=1)
        fleet.until_status([renamed, crash], {TSQ}, 15)
        until(lambda: not renamed_sessions(), 2)
        assert fleet.attempts(renamed)[0].error_type == "WorkerLost"


def test_a_polluted_process_is_put_right(fleet: Fleet) -> None:
    """Directory, umask and locale are back for the next handler, context variables too. Thread-locals stay."""
    fleet.meet_at_once(10)

    def looks() -> list[dict[str, str]]:
        ids = fleet.send_healthy(8, "traces")
        fleet.until_status(ids, {COMPLETED})
        query = "SELECT result FROM commandbus.command WHERE command_id = ANY(%s)"
        return [row[0] | {"thread_local": ""} for row in fleet.db.execute(query, (ids,))]

    clean = looks()[0]
    for _ in range(3):
        ids = [fleet.send("hang.pollute", max_attempts=1) for _ in range(SLOTS)]
        fleet.until_status(ids, {COMPLETED})
        assert [found for found in looks() if found != clean] == []
    assert clean["context_variable"] == ""


def test_a_zombie_in_a_draining_worker_lands_nothing(fleet: Fleet) -> None:
    """A healthy command keeps the old worker alive; what was declared stuck there wakes up, and writes in vain."""
    settled_workers(fleet)
    (meet,) = fleet.new_ids("meet", 1)
    fleet.bus.send("zoo", "meet", {"port": fleet.meeting.port}, command_id=meet, max_attempts=1)
    fleet.meeting.until_present(1, 10)
    ids = [
        fleet.send(f"hang.{kind}", {"seconds": 2.2}, max_attempts=1) for kind in ("sleep", "double_lock", "recv")
    ]
    fleet.until_status(ids, {TSQ}, 10)
    until(lambda: len(fleet.workers()) == 2, 5, what="the replacement runs beside the draining worker")
    woken_at = max(fleet.attempts(command_id)[-1].started_at for command_id in ids) + 2.5
    until(lambda: time.time() > woken_at)
    fleet.meeting.let_go()
    fleet.until_status([meet], {COMPLETED})
    settled_workers(fleet)
    rows = fleet.db.execute("SELECT * FROM marker WHERE command_id = ANY(%s)", (ids,)).fetchall()
    assert rows == []


def settled_workers(fleet: Fleet) -> list[int]:
    """The workers, when no old one drains any more."""
    return until(lambda: len(found := fleet.workers()) == 1 and found, 10)
