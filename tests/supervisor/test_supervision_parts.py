"""The supervisor's small parts, each alone: budget, letter, vitals, errors that cross over, and the view."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from commandbus.cli.exit_codes import ExitCode, code_for
from commandbus.errors import ConfigurationError, UnknownDomainError
from commandbus.flow.commands.rescue import ClaimableWork, Rule
from commandbus.model.breaker import Breaker
from commandbus.model.crash_attribution import Dump
from commandbus.model.limit import Limit
from commandbus.model.retry import RetryPolicy
from commandbus.settings import Settings
from commandbus.supervisor import read_proc as vitals
from commandbus.supervisor import start_message
from commandbus.supervisor.coroner import CoronerLook
from commandbus.supervisor.death_log import summary
from commandbus.supervisor.restart_budget import RestartBudget
from commandbus.supervisor.start_message import StartMessage
from commandbus.supervisor.view import View, WorkerView, live, metrics, ready
from commandbus.supervisor.worker_messages import Failed
from commandbus.supervisor.worker_start import place_of
from commandbus.worker.board import State
from commandbus.worker.memory import resident_megabytes
from support.waiting import until

# --- budget ------------------------------------------------------------------------------------------------


def test_workers_that_die_at_once_are_replaced_ever_more_slowly() -> None:
    budget = RestartBudget()
    pauses = [budget.died(100.0 + n, lived_seconds=0.5, was_running=False) for n in range(0, 400, 50)]
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    assert not budget.may_start(479.0)
    assert budget.may_start(480.0)


def test_those_that_were_started_together_count_once() -> None:
    budget = RestartBudget()
    pauses = []
    for n in range(0, 200, 50):
        pauses.append(budget.died(100.0 + n, lived_seconds=0.5, was_running=False))
        budget.died(100.1 + n, lived_seconds=0.6, was_running=False)
    assert pauses == [0, 1, 2, 4]


def test_a_long_life_ends_the_row() -> None:
    budget = RestartBudget()
    for n in range(5):
        budget.died(100.0 + n, lived_seconds=0.5, was_running=False)
    assert budget.died(200.0, lived_seconds=11.0, was_running=False) == 0
    assert budget.died(201.0, lived_seconds=0.5, was_running=False) == 0
    for n in range(5):
        budget.died(300.0 + n, lived_seconds=0.5, was_running=False)
    budget.survived(305.0)
    assert budget.died(400.0, lived_seconds=0.5, was_running=False) == 0


def test_the_life_of_one_that_was_there_before_does_not_end_the_row() -> None:
    budget = RestartBudget()
    for n in range(5):
        budget.died(100.0 + n, lived_seconds=0.5, was_running=False)
        budget.survived(50.0)
        assert budget.times("no such module") == n + 1
    assert budget.died(104.5, lived_seconds=54.5, was_running=False) == 7.5  # the pause of the others is its too
    assert budget.died(200.0, lived_seconds=0.5, was_running=False) == 16
    assert budget.times("another cause") == 1


def test_crashes_of_handlers_cost_at_most_a_second() -> None:
    budget = RestartBudget()
    pauses = [budget.died(100.0, lived_seconds=0.5, was_running=True) for _ in range(6)]
    assert pauses == [0, 0, 0, 1, 1, 1]


# --- letter ------------------------------------------------------------------------------------------------


def test_settings_cross_over_unchanged() -> None:
    settings = Settings(
        database_url="postgresql://me:secret@host/db",
        domains=("a", "b"),
        backoff_schedule=(1.0, 2.0),
        task_timeout=0.0,
        max_memory_mb=512,
        limits=(Limit("docai", concurrency=5, rate="120/m"),),
        breakers={"orders/ship": Breaker(stuck=3)},
        config_file=Path("/etc/commandbus.toml"),
    )
    fd = start_message.write(StartMessage(settings, "s-1", 42, 5, 6, 7, 8, 9))
    read = start_message.read(fd)
    assert read == StartMessage(settings, "s-1", 42, 5, 6, 7, 8, 9)
    assert (read.settings.origins, read.settings.config_file) == (settings.origins, settings.config_file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("no such thing"), ExitCode.CONFIGURATION),
        (UnknownDomainError("orders"), ExitCode.NOT_FOUND),
        (psycopg.OperationalError("away"), ExitCode.DATABASE),
        (psycopg.errors.UndefinedTable("gone"), ExitCode.DATABASE),
        (KeyError("x"), ExitCode.BUG),
    ],
)
def test_an_error_of_a_worker_is_the_supervisors(error: Exception, code: ExitCode) -> None:
    failed = Failed(type(error).__module__, type(error).__name__, str(error))
    rebuilt = failed.rebuilt()
    assert code_for(rebuilt) == code
    assert str(error) in str(rebuilt)


def test_rules_are_read_from_a_workers_words() -> None:
    words = {"max_attempts": 5, "backoff_schedule": [1, 2], "jitter": 0.5, "on_timeout": "fail"}
    assert Rule.read(words) == Rule(RetryPolicy(5, (1.0, 2.0), 0.5), "fail")


# --- vitals ------------------------------------------------------------------------------------------------


def test_the_thread_that_works_is_seen() -> None:
    done = threading.Event()
    ready_to_go = threading.Event()
    ids: list[int] = []

    def spin() -> None:
        ids.append(threading.get_native_id())
        ready_to_go.set()
        while not done.is_set():
            pass

    spinning = threading.Thread(target=spin)
    before = vitals.thread_cpu(os.getpid())
    spinning.start()
    assert ready_to_go.wait(60)

    def used() -> float:
        return vitals.cpu_since(before, vitals.thread_cpu(os.getpid())).get(ids[0], 0.0)

    try:
        until(lambda: used() >= 0.1, 10)
    finally:
        done.set()
        spinning.join()
    assert resident_megabytes(os.getpid()) > 5
    assert not vitals.is_stopped(os.getpid())


def test_a_process_that_is_gone_has_no_vitals() -> None:
    assert vitals.thread_cpu(2**22 + 1) == {}
    assert resident_megabytes(2**22 + 1) == 0.0
    assert not vitals.is_stopped(2**22 + 1)


# --- words -------------------------------------------------------------------------------------------------


def test_where_a_start_is_leaves_libraries_out() -> None:
    library = f'File "{threading.__file__}", line 5 in wait'
    stack = [library, 'File "/app/shop.py", line 3 in <module>', 'File "<frozen importlib>", line 9 in _load']
    assert place_of(Dump(7, {7: stack, 8: [library]})) == "/app/shop.py:3"
    assert place_of(Dump(None, {7: stack, 8: [library]})) == f"{threading.__file__}:5"
    assert place_of(Dump(None, {7: stack[2:]})) == "<frozen importlib>:9"
    assert place_of(Dump()) == ""


def test_a_post_mortem_names_the_first_commands() -> None:
    named = {
        "suspect": [f"c{n}" for n in range(7)],
        "bystander": ["a", "b"],
        "culprit": ["x"],
        "given back": ["y"],
    }
    said = "2 bystanders (a, b), 1 culprit (x), 1 given back, 7 suspects (c0, c1, c2, c3, c4, …)"
    assert summary(named) == said
    assert summary({}) == "nothing was left"


# --- view --------------------------------------------------------------------------------------------------

WORKER = WorkerView("w1", 7, State.ACTIVE, 0, "", running=1, free=3, stuck=0, rss_mb=50.0, silent_seconds=0.1)
GOOD = View(100.0, "RUNNING", (WORKER, replace(WORKER, id="w2")), claimed_at=99.0, look=CoronerLook(99.0))


def with_workers(**changes: object) -> View:
    return replace(GOOD, workers=tuple(replace(worker, **changes) for worker in GOOD.workers))  # type: ignore[arg-type]


def waiting(seconds: float, *, claimed_at: float = 80.0) -> View:
    return replace(GOOD, claimed_at=claimed_at, look=CoronerLook(99.0, {"orders": ClaimableWork(5, seconds, 2)}))


@pytest.mark.parametrize(
    ("seen", "is_live", "is_ready", "said"),
    [
        (GOOD, True, True, ""),
        (replace(GOOD, at=90.0), False, False, "loop has not run"),
        (with_workers(silent_seconds=6.0), False, True, "frozen"),
        (replace(GOOD, workers=(replace(WORKER, silent_seconds=6.0), WORKER)), True, True, ""),
        (with_workers(state=State.STARTING, silent_seconds=0.0), True, False, "no worker is ready"),
        (
            with_workers(state=State.STARTING, silent_seconds=0.0, note="has been starting for 12 s"),
            True,
            False,
            "no worker is ready: worker w1 has been starting for 12 s; worker w2 has",
        ),
        (replace(GOOD, workers=()), True, False, "no worker is ready"),
        (with_workers(state=State.DRAINING), True, False, "no worker is ready"),
        (with_workers(state=State.PAUSED, health=1, note="paused by ann"), True, True, "paused by ann"),
        (with_workers(state=State.PAUSED, silent_seconds=60.0), False, True, "all workers are frozen"),
        (with_workers(health=2, note="3 stuck"), True, False, "3 stuck"),
        (with_workers(health=1, note="failing"), True, True, "failing"),
        (replace(GOOD, workers=(replace(WORKER, health=2), WORKER)), True, True, "w1 is critical"),
        (replace(GOOD, phase="STOPPING"), True, False, "stopping"),
        (replace(GOOD, trouble="the coroner has ended"), True, False, "the coroner has ended"),
        (replace(GOOD, look=CoronerLook(90.0, {}, 95.0)), True, False, "database"),
        (replace(GOOD, look=CoronerLook(90.0, {}, 99.5)), True, True, ""),
        (waiting(15.0), True, False, "nothing is being claimed"),
        (waiting(5.0), True, True, ""),
        (waiting(15.0, claimed_at=98.0), True, True, ""),
        (replace(waiting(15.0), workers=(replace(WORKER, free=0),)), True, True, ""),
    ],
)
def test_what_the_probes_say(seen: View, is_live: bool, is_ready: bool, said: str) -> None:
    alive, able = live(seen, 100.0), ready(seen, 100.0)
    assert (alive.ok, able.ok) == (is_live, is_ready)
    assert said in str(alive.document) + str(able.document)


def test_degraded_is_said() -> None:
    assert ready(with_workers(health=1), 100.0).document["status"] == "degraded"
    assert ready(GOOD, 100.0).document["status"] == "healthy"


def test_metrics_can_be_scraped() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = metrics(
        replace(waiting(15.0), settled=9, stuck=1, restarts=2, ends_by_cause={"frozen": 1}, postmortems=1)
    )
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["commandbus_workers", "active"] == 2
    assert found["commandbus_workers_health", "healthy"] == 2
    assert found["commandbus_running",] == 2
    assert found["commandbus_slots_free",] == 6
    assert found["commandbus_settled_total",] == 9
    assert found["commandbus_stuck_total",] == 1
    assert found["commandbus_worker_ends_total", "frozen"] == 1
    assert found["commandbus_ready", "orders"] == 5
    assert found["commandbus_oldest_ready_seconds", "orders"] == 15
    assert found["commandbus_troubleshooting_queue", "orders"] == 2
    assert found["commandbus_database_up",] == 1
