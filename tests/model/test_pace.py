"""How many slots are awake: the pace finds it out by the rate, for handlers that compute and those that wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from commandbus.worker.execution.slot_pacing import (
    FULL_SECONDS,
    REST_SECONDS,
    SOON_SECONDS,
    WINDOW_SECONDS,
    SlotPacing,
)

TOTAL = 10


@dataclass
class Lane:
    """Slots and a clock. `rate` says how many commands a second so many awake slots finish."""

    rate: Callable[[int], float]
    awake: int = 1
    now: float = 100.0
    finished: float = 0.0

    def __post_init__(self) -> None:
        self.pace = SlotPacing(TOTAL)
        self.looks = 0
        self.pause = self.pace.begin(self.now, int(self.finished))

    def run(self, seconds: float) -> float:
        """Let it work; returns the rate."""
        began, before = self.now, self.finished
        while self.now < began + seconds:
            self.now += self.pause
            self.finished += self.pause * self.rate(self.awake)
            self.pause = self.pace.look(self.now, int(self.finished), self.awake)
            self.awake = self.pace.level
            self.looks += 1
        return (self.finished - before) / (self.now - began)


def computing(awake: int) -> float:
    """Threads that hand the GIL around: the more, the slower."""
    return 50_000 / (1 + 0.1 * (awake - 1))


def waiting(seconds: float) -> Callable[[int], float]:
    return lambda awake: awake / seconds


def test_one_slot_is_enough_for_handlers_that_compute() -> None:
    lane = Lane(computing)
    lane.run(1.0)
    assert lane.awake == 1


def test_slots_that_are_too_many_go_to_sleep() -> None:
    lane = Lane(computing, awake=TOTAL)
    lane.run(0.3)
    assert lane.awake == 1


@pytest.mark.parametrize("seconds", [0.001, 0.02, 1.0])
def test_handlers_that_wait_get_every_slot_at_once(seconds: float) -> None:
    lane = Lane(waiting(seconds * 1.1))
    lane.run(5 * SOON_SECONDS)
    assert lane.awake == TOTAL


def test_where_every_slot_is_needed_it_looks_rarely() -> None:
    lane = Lane(waiting(1.0), awake=TOTAL)
    lane.run(2.0)
    assert lane.looks <= 2 / FULL_SECONDS + 2


@pytest.mark.parametrize("seconds", [0.0002, 0.0005])
def test_handlers_that_wait_briefly_lose_little_to_the_trials(seconds: float) -> None:
    """All slots together finish at most 40,000 a second: the GIL allows no more."""
    lane = Lane(lambda awake: min(awake / seconds, 40_000.0))
    lane.run(1.0)
    assert lane.run(5.0) >= 0.9 * min(TOTAL / seconds, 40_000.0)


def test_a_wrong_trial_is_not_repeated_for_a_while() -> None:
    lane = Lane(lambda awake: min(awake * 8, TOTAL * 7) * 100.0)  # fewer than all are slower
    lane.awake = lane.pace.level = TOTAL
    lane.run(3 * WINDOW_SECONDS)  # the trial, and what became of it
    looked_at = []
    while lane.now < 100.0 + REST_SECONDS:
        lane.run(WINDOW_SECONDS)
        looked_at.append(lane.awake)
    assert set(looked_at) == {TOTAL}


def test_handlers_that_become_slow_have_all_slots_soon() -> None:
    lane = Lane(computing)
    lane.run(1.0)
    lane.rate = waiting(0.05)
    lane.run(2 * WINDOW_SECONDS)
    assert lane.awake == TOTAL


def test_handlers_that_become_fast_have_few_slots_soon() -> None:
    lane = Lane(waiting(0.05))
    lane.run(1.0)
    lane.rate = computing
    lane.run(1.0)
    assert lane.awake == 1


def test_the_level_outlives_the_work() -> None:
    lane = Lane(waiting(0.05))
    lane.run(1.0)
    lane.pace.begin(lane.now + 60.0, int(lane.finished))
    assert lane.pace.level == TOTAL
