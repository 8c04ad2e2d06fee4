"""What the tests of breakers share: reports as workers make them, and time that passes at once."""

from __future__ import annotations

import itertools
from typing import Any

import psycopg
from flow_harness import Bus, one

from commandbus.flow.breakers.breaker import Bad, Moved, advance, report
from commandbus.model.breaker import Breaker

Db = psycopg.Connection[Any]
THREE = Breaker(stuck=3, reset=60.0)
_others = itertools.count(1_000_000)


def stuck(command: int | None = None, text: str = "ExecutionStuck: it hangs", ago: float = 0.0) -> Bad:
    """An attempt that was stuck, of a command of its own unless one is given; it began so many seconds ago."""
    return Bad(next(_others) if command is None else command, is_stuck=True, text=text, began_ago=ago)


def failed(command: int | None = None, text: str = "ValueError: no", ago: float = 0.0) -> Bad:
    """An attempt that failed."""
    return Bad(next(_others) if command is None else command, is_stuck=False, text=text, began_ago=ago)


def tell(
    bus: Bus, *bad: Bad, good: list[int] | None = None, rule: Breaker = THREE, kind: str = "Ship"
) -> Moved | None:
    """Report as a worker does."""
    moved: Moved | None = bus.run(report("orders", kind, rule, bad=bad, good=good or []))
    return moved


def open_it(bus: Bus, kind: str = "Ship") -> None:
    """Three stuck attempts at once."""
    moved = tell(bus, *[stuck() for _ in range(3)], kind=kind)
    assert moved is not None
    assert moved.state == "OPEN"


def let_time_pass(db: Db) -> None:
    """As if the time in which open breakers are left alone had passed."""
    db.execute("UPDATE commandbus.breaker SET until = now() - interval '1 ms' WHERE NOT is_forced")


def step(bus: Bus, kind: str = "Ship") -> Moved | None:
    """Look after it as a worker does."""
    moved: Moved | None = bus.run(advance("orders", kind))
    return moved


def half_open(bus: Bus, db: Db, kind: str = "Ship") -> int:
    """Let time pass, and answer the probe."""
    let_time_pass(db)
    moved = step(bus, kind)
    assert moved is not None
    assert moved.state == "HALF_OPEN"
    probe: int = one(db, "SELECT probe FROM commandbus.breaker WHERE command_type = %s", kind)
    return probe


def state(db: Db, kind: str = "Ship") -> str:
    """Its stored state."""
    found: str = one(db, "SELECT state FROM commandbus.breaker WHERE command_type = %s", kind)
    return found


def actions(db: Db) -> list[tuple[str, str, str]]:
    """(subject, action, operator) of everything that was done to breakers, in order."""
    return db.execute("SELECT subject, action, operator FROM commandbus.control_action ORDER BY id").fetchall()
