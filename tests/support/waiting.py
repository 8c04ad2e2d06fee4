"""Wait for a condition, never for a time: what is awaited is looked at again and again, until a deadline.

A machine that is busy, or stands still for seconds, says nothing about the product. `until` therefore counts its
looks, too: as long as it gets to look less often than it would on an idle machine, what it waits for may take
longer as well. A limit that is a promise of the product belongs to `within`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep  # bound here: some handlers move the clocks of the time module
from typing import Any, TypeVar

import psycopg

T = TypeVar("T")
LOOK_SECONDS = 0.01
LOOKS_A_SECOND = 50  # an idle machine manages 70 to 95, with a query in each
PATIENCE = 6  # how much slower than an idle machine may this one be?


def until(condition: Callable[[], T], seconds: float = 15.0, *, what: str | Callable[[], object] = "") -> T:
    """The first true answer of the condition; fails if an idle machine would have had it after `seconds`."""
    return _wait(condition, seconds, seconds * PATIENCE, what)


def within(seconds: float, condition: Callable[[], T], *, what: str | Callable[[], object] = "") -> T:
    """The first true answer of the condition; fails when the deadline passes without one."""
    return _wait(condition, seconds, seconds, what)


def _wait(condition: Callable[[], T], least: float, most: float, what: str | Callable[[], object]) -> T:
    began, looks = monotonic(), 0
    while True:
        if answer := condition():
            return answer
        looks += 1
        passed = monotonic() - began
        if passed > most or (passed > least and looks > least * LOOKS_A_SECOND):
            said = what() if callable(what) else what
            raise AssertionError(f"did not happen within {passed:.1f} s, in {looks} looks: {said or condition}")
        sleep(LOOK_SECONDS)


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
