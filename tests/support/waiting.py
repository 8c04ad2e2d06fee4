"""Wait for a condition, never for a time: what is awaited is looked at again and again, until a deadline.

A machine that is busy, or stands still for seconds, says nothing about the product. `until` therefore measures how
much slower than an idle one this machine is: how many tasks want each processor, and how much longer each look
takes. What it waits for may take as much longer. A limit that is a promise of the product belongs to `within`.
A `Stopwatch` measures the time of what must end soon in the same way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep  # bound here: some handlers move the clocks of the time module
from typing import Any, TypeVar

import psycopg

T = TypeVar("T")
LOOK_SECONDS = 0.01
LONGEST_PAUSE = 0.1  # between two looks, after a second and a half: looking costs what others need to get on
LOOK_TAKES = 0.01  # a look with a query, at most, on an idle machine: it is one to four milliseconds
LONGEST_WATCH = 240.0  # a stopwatch that a failed test has left running
PATIENCE = 6  # how much slower than an idle machine may this one be?


def until(condition: Callable[[], T], seconds: float = 15.0, *, what: str | Callable[[], object] = "") -> T:
    """The first true answer of the condition; fails if an idle machine would have had it after `seconds`."""
    return _wait(condition, seconds, seconds * PATIENCE, what)


def within(seconds: float, condition: Callable[[], T], *, what: str | Callable[[], object] = "") -> T:
    """The first true answer of the condition; fails when the deadline passes without one."""
    return _wait(condition, seconds, seconds, what)


def _wait(condition: Callable[[], T], least: float, most: float, what: str | Callable[[], object]) -> T:
    began = last = monotonic()
    pause, looks, idle = LOOK_SECONDS, 0, 0.0  # idle: how long an idle machine would have taken until here
    while True:
        if answer := condition():
            return answer
        looks += 1
        passed = monotonic() - began
        if passed > most or (passed > least and idle > least):
            said = what() if callable(what) else what
            raise AssertionError(f"did not happen within {passed:.1f} s, in {looks} looks: {said or condition}")
        pause = min(LONGEST_PAUSE, max(LOOK_SECONDS, passed / 15))
        sleep(pause)
        took, last = (now := monotonic()) - last, now
        idle += took * min(1 / _crowding(), (LOOK_SECONDS + LOOK_TAKES) / (LOOK_SECONDS + took - pause))


def _crowding() -> float:
    """How many tasks want each processor at this moment: at least one."""
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return max(1.0, running / len(os.sched_getaffinity(0)))


class Stopwatch:
    """Runs from the moment when it is made: how long something takes, on an idle machine."""

    def __init__(self) -> None:
        self._began = monotonic()
        self._seen = [_crowding()]
        self._is_read = threading.Event()
        threading.Thread(target=self._look, name="stopwatch", daemon=True).start()

    def seconds(self, *, waits: float = 0.0) -> float:
        """How long it took, read once. For `waits` seconds of that nobody computed: a timeout passed, or a handler
        slept, and that takes as long on any machine. The rest takes longer where others compute, too."""
        took = monotonic() - self._began
        self._is_read.set()
        return self.idle(took, waits=waits)

    def idle(self, took: float, *, waits: float = 0.0) -> float:
        """What took so long while it ran: how long on an idle machine?"""
        pace = min(PATIENCE, sum(self._seen) / len(self._seen))
        return min(took, waits) + max(0.0, took - waits) / pace

    def _look(self) -> None:
        while not self._is_read.wait(LOOK_SECONDS * 2) and monotonic() < self._began + LONGEST_WATCH:
            self._seen.append(_crowding())


def until_settled(db: psycopg.Connection[Any], seconds: float = 20.0) -> None:
    """Until no command waits or runs."""
    until(
        lambda: one(db, "SELECT NOT EXISTS (SELECT FROM commandbus.command WHERE status = 'PENDING')"),
        seconds,
        what=lambda: db.execute(
            "SELECT command_id, command_type FROM commandbus.command WHERE status = 'PENDING' LIMIT 20"
        ).fetchall(),
    )


def one(db: psycopg.Connection[Any], query: str, *params: Any) -> Any:
    """The single value of a query."""
    row = db.execute(query.encode(), params or None).fetchone()
    assert row is not None
    return row[0]


def statuses(db: psycopg.Connection[Any]) -> dict[str, int]:
    """How many commands are in which state."""
    rows = db.execute("SELECT status::text, count(*) FROM commandbus.command GROUP BY 1").fetchall()
    return dict(rows)


def verdicts(db: psycopg.Connection[Any], command_id: str) -> list[tuple[int, str]]:
    """(number, verdict) of a command's recorded attempts, in order."""
    rows = db.execute(
        "SELECT a.number, a.verdict FROM commandbus.attempt a JOIN commandbus.command c ON c.id = a.command "
        "WHERE c.command_id = %s ORDER BY a.number, a.finished_at",
        (command_id,),
    )
    return [(number, verdict) for number, verdict in rows]
