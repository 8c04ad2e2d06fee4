"""suspects: what losses, crashes and failures cost, as a table and as a property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.model.outcome import Failure
from commandbus.model.suspects import LONGEST_DELAY, Marks, delay_apart

CRASH = Failure("WorkerLost", "WORKER_LOST", "it died", rung="crash")
ERROR = Failure("ValueError", "ERROR", "no")
LATE = Failure("DeadlineExceededError", "TIMEOUT", "too late", rung="deadline")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Marks(), Marks(1, 1, alone=True)),
        (Marks(5, None, quarantine=True), Marks(6, 1, quarantine=True, alone=True)),
        (Marks(2, 1), Marks(3, 2, alone=True)),
        (Marks(1, 1, alone=True), Marks(1, 1, alone=True)),
        (Marks(7, 3, quarantine=True, alone=True), Marks(7, 3, quarantine=True, alone=True)),
    ],
)
def test_a_loss_of_one_that_ran(before: Marks, after: Marks) -> None:
    assert before.after_loss(ran_alone=True) == after


def test_a_loss_of_a_suspect_that_had_not_started_changes_nothing_but_the_waiver() -> None:
    assert Marks(1, 1, alone=True).after_loss(ran_alone=False) == Marks(2, 1, alone=True)
    assert Marks(1, 1, alone=True).after_loss(ran_alone=False, unstarted=2) == Marks(4, 1, alone=True)


def test_holders_that_never_started_it_are_waived() -> None:
    assert Marks().after_loss(ran_alone=False, unstarted=3) == Marks(4, 1, alone=True)
    assert Marks(1, 1, alone=True).after_loss(ran_alone=True, unstarted=3) == Marks(4, 1, alone=True)


def test_failures() -> None:
    assert Marks().after_failure(ERROR) == Marks()
    lost = Marks(1, 1, alone=True)
    assert Marks(1, 1).after_failure(ERROR) == lost.after_failure(ERROR) == lost.after_failure(LATE) == Marks(1)
    assert Marks().after_failure(CRASH) == Marks(quarantine=True)
    assert Marks(3, 2, alone=True).after_failure(CRASH) == Marks(1, quarantine=True)
    assert Marks(1, 1, alone=True).after_suspicion() == Marks(2, 2, alone=True)
    assert Marks().after_suspicion(in_chunk=True) == Marks(1, 1, alone=True)


@given(st.integers(1, 6), st.integers(0, 4))
def test_one_that_kills_every_time_starts_at_most_once_more_than_its_limit(limit: int, losses: int) -> None:
    """Its first starts end the whole container, and the others its child process: only that is a verdict."""
    marks, starts = Marks(), 0
    while starts - marks.waived < limit:
        starts += 1
        lost = starts <= losses
        marks = marks.after_loss(ran_alone=marks.alone) if lost else marks.after_failure(CRASH)
    assert starts == max(limit, min(losses, limit) + 1 if losses else 1)


@given(st.integers(0, 1000), st.floats(0, 1))
def test_delays_grow_to_a_limit(waived: int, spread: float) -> None:
    assert 0.05 <= delay_apart(waived, spread=spread) <= 1.5 * LONGEST_DELAY
    assert delay_apart(waived, spread=spread) <= delay_apart(waived + 1, spread=spread)
