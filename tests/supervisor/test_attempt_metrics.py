"""Metrics of attempts: what Prometheus reads of them, and that a replaced worker takes nothing with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from commandbus import CommandBus, NewCommand
from commandbus.model.attempt_counts import BOUNDS, BUCKETS, OUTCOMES, AttemptCounts, Histogram, TypeCounts
from commandbus.model.outcome import Verdict
from commandbus.supervisor.attempt_metrics import attempt_metrics
from commandbus.supervisor.metrics import render
from commandbus.supervisor.view import View, metrics
from support.supervised import Supervised
from support.waiting import one, until, until_settled

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]
HOSTILE = 'a"b\\c\nd{e="1"} 2 \u202e\x1b[31m\u2028'


def parsed(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def some_counts(command_type: str = "ship") -> AttemptCounts:
    waits = Histogram(tuple(int(n == 2) for n in range(BUCKETS)), 0.02)
    runs = Histogram((1,) * BUCKETS, 5000.0)
    outcomes = tuple(7 if name == "completed" else 0 for name in OUTCOMES)
    return AttemptCounts({("orders", command_type): TypeCounts(outcomes, waits, runs)}, 3, 2, waits)


def test_histograms_are_cumulative_and_counters_have_their_labels() -> None:
    found = parsed(render(attempt_metrics(some_counts())))
    assert found["commandbus_attempts_total", "orders", "ship", "completed"] == 7
    assert found["commandbus_wait_seconds_bucket", "orders", "ship", "0.01"] == 0
    assert found["commandbus_wait_seconds_bucket", "orders", "ship", "0.025"] == 1
    assert found["commandbus_wait_seconds_bucket", "orders", "ship", "+Inf"] == 1
    assert found["commandbus_run_seconds_bucket", "orders", "ship", "+Inf"] == BUCKETS
    assert found["commandbus_run_seconds_bucket", "orders", "ship", f"{BOUNDS[-1]:g}"] == BUCKETS - 1
    assert found["commandbus_run_seconds_count", "orders", "ship"] == BUCKETS
    assert found["commandbus_run_seconds_sum", "orders", "ship"] == 5000
    assert found["commandbus_lease_losses_total",] == 3
    assert found["commandbus_connection_timeouts_total",] == 2


def test_a_hostile_type_is_one_label_value_in_which_every_character_is_seen() -> None:
    text = render(attempt_metrics(some_counts(HOSTILE)))
    shown = {sample.labels["command_type"] for family in text_string_to_metric_families(text)
             for sample in family.samples if "command_type" in sample.labels}  # fmt: skip
    assert shown == {'a"b\\c\\nd{e="1"} 2 \\u202e\\x1b[31m\\u2028'}


def test_promtool_finds_nothing_wrong() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    text = metrics(View(1.0, "RUNNING"), some_counts(HOSTILE))
    found = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_the_coroners_settlements_count() -> None:
    counts = some_counts().with_one("orders", "ship", Verdict.RETRY).with_one("orders", "ship", Verdict.RETRY)
    found = parsed(render(attempt_metrics(counts)))
    assert found["commandbus_attempts_total", "orders", "ship", "retry"] == 2
    assert found["commandbus_attempts_total", "orders", "ship", "completed"] == 7


@pytest.mark.slow
def test_no_count_is_lost_when_workers_are_killed_or_replaced(
    supervise: Supervise, bus: CommandBus, db: Db, tasks: Path
) -> None:
    supervised = supervise(task_timeout="30s", concurrency=2).until_ready()

    def scraped(*key: str) -> float:
        return parsed(supervised.ask("/metrics")[1]).get(key, 0)

    def completed() -> float:
        return scraped("commandbus_attempts_total", "orders", "quick", "completed")

    for n in range(1, 4):
        bus.send_many("orders", [NewCommand("quick") for _ in range(40)])
        until(lambda n=n: completed() == 40 * n, what=lambda: supervised.ask("/metrics")[1])
        (pid,) = supervised.workers()
        if n == 1:  # idle, by kill -9
            os.kill(pid, signal.SIGKILL)
        elif n == 2:  # by a command
            bus.send("orders", "exit", max_attempts=1)
            until_settled(db)
        else:  # in order
            supervised.signal(signal.SIGHUP)
        until(lambda pid=pid: supervised.workers() and pid not in supervised.workers())
        assert completed() == 40 * n
    assert scraped("commandbus_run_seconds_count", "orders", "quick") == 120
    assert scraped("commandbus_wait_seconds_count", "orders", "quick") == 120
    # What a dead worker ran counts, too: the coroner settled it.
    (verdict,) = {name.lower() for (name,) in db.execute("SELECT verdict FROM commandbus.attempt")}
    assert scraped("commandbus_attempts_total", "orders", "exit", verdict) == one(
        db, "SELECT count(*) FROM commandbus.attempt"
    )
