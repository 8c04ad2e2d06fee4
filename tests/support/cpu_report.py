"""`./dev test --cpu`: which tests use how much CPU time, they and the processes that they waited for; and which
were the last to end, when processors had nothing to do.

Each test worker writes a line per test into the run's folder; the controller adds them up at the end. The run's
PostgreSQL works for all tests at once: its time is in the total alone. A fixture that is shared by several tests
counts for the one that made it, and what it started for the one at whose end it was ended.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "COMMANDBUS_TEST_CPU"
MOST_SHOWN = 25
LAST_SHOWN = 15
_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def measured(item: pytest.Item, folder: Path) -> Iterator[None]:
    """Write down what this test uses, if `--cpu` asks for it."""
    if not os.environ.get(VARIABLE):
        yield
        return
    used, began = _used(), time.monotonic()
    yield
    with (folder / f"cpu-{os.getpid()}").open("a") as file:
        print(json.dumps([item.nodeid, _used() - used, began, time.monotonic()]), file=file)


def show(reporter: Any, folder: Path) -> None:
    """The total, the functions that use most, and the tests that were the last to end."""
    if not os.environ.get(VARIABLE):
        return
    by_function: Counter[str] = Counter()
    tests = []
    for path in folder.glob("cpu-*"):
        for line in path.read_text().splitlines():
            name, seconds, began, ended = json.loads(line)
            by_function[name.partition("[")[0]] += seconds
            tests.append((ended, began, name))
    reporter.section("CPU time")
    reporter.line(f"{sum(by_function.values()):8.1f} s  tests, and processes that they waited for")
    reporter.line(f"{sum(map(_of_server, folder.glob('server/*/postmaster.pid'))):8.1f} s  the run's PostgreSQL")
    for name, seconds in by_function.most_common(MOST_SHOWN):
        reporter.line(f"{seconds:8.1f} s  {name}")
    reporter.line("The last to end: how long before the end each began and ended")
    last = sorted(tests)[-LAST_SHOWN:]
    for ended, began, name in last:
        reporter.line(f"{last[-1][0] - began:8.1f} s {last[-1][0] - ended:8.1f} s  {name}")


def _used() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def _of_server(pid_file: Path) -> float:
    """A server, and all its sessions: those that have ended count for their parent."""
    server = pid_file.read_text().split("\n", 1)[0]
    sessions = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return _of_process(server, *range(11, 15)) + sum(_of_process(pid, 11, 12) for pid in sessions)


def _of_process(pid: str, *fields: int) -> float:
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended meanwhile
    return sum(int(found[field]) for field in fields) / _TICKS
