"""AttemptRegistry: of the slot and the ladder, one gets an attempt, and settles it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from commandbus import HandlerRegistry
from commandbus.worker.attempt_registry import AttemptRegistry
from commandbus.worker.counts_page import CountsPage
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.concurrency import ConcurrencyBudget
from commandbus.worker.execution.slots import Slot, Slots
from commandbus.worker.isolation.quarantine import Quarantine

ROUNDS = 500


@pytest.fixture
def attempts() -> AttemptRegistry:
    quarantine = Quarantine(HandlerRegistry(), turn=None, processes=lambda: None, on_turn=lambda _: None)
    return AttemptRegistry({}, quarantine, None, CountsPage())


@pytest.fixture
def slot() -> Slot:
    return Slot(0, Slots(ConcurrencyBudget(1), lambda *_: True, name="test", on_thread=lambda _: None))


def an_attempt(number: int = 1) -> Attempt:
    row: tuple[Any, ...] = (number, 1, number, f"c{number}", "ship", None, 0, 0, *(None,) * 17)
    attempt = Attempt("orders", row, None, 0.0)
    attempt.started_at = 1.0
    return attempt


def test_an_attempt_that_ended_cannot_be_taken(attempts: AttemptRegistry, slot: Slot) -> None:
    attempt = an_attempt()
    attempts.begin(attempt, slot)
    assert attempts.running == {attempt: slot}
    assert attempts.end(attempt, slot)
    assert attempts.take(attempt) is None
    assert attempt.is_fenced, "it is over: what it left behind gets no connection"


def test_an_attempt_that_was_taken_does_not_end_and_gets_no_connection(
    attempts: AttemptRegistry, slot: Slot
) -> None:
    attempt = an_attempt()
    attempts.begin(attempt, slot)
    assert attempts.take(attempt) is slot
    assert attempt.is_fenced
    assert attempt.started_at, "the ladder says for how long it ran"
    assert not attempts.end(attempt, slot)


def test_an_attempt_that_is_due_before_the_ladder_looks_wakes_it(attempts: AttemptRegistry, slot: Slot) -> None:
    woken: list[str] = []
    attempts.wake_ladder = lambda: woken.append("ladder")
    soon, later = an_attempt(1), an_attempt(2)
    soon.deadline_at, later.deadline_at = 9.9, 10.1
    attempts.looks_at = 10.0
    attempts.begin(later, slot)
    attempts.begin_chunk(later, slot)
    assert not woken
    attempts.begin(soon, slot)
    assert woken == ["ladder"]
    attempts.begin_chunk(soon, slot)
    assert woken == ["ladder"] * 2


def test_of_a_slot_and_the_ladder_exactly_one_owns_the_settlement(attempts: AttemptRegistry, slot: Slot) -> None:
    both = threading.Barrier(2)
    all_attempts = [an_attempt(number) for number in range(ROUNDS)]
    for attempt in all_attempts:
        attempts.begin(attempt, slot)
    taken: list[bool] = []

    def ladder() -> None:
        for attempt in all_attempts:
            both.wait(10)
            taken.append(attempts.take(attempt) is not None)

    thread = threading.Thread(target=ladder)
    thread.start()
    ended = []
    for attempt in all_attempts:
        both.wait(10)
        ended.append(attempts.end(attempt, slot))
    thread.join(10)
    assert [by_slot != by_ladder for by_slot, by_ladder in zip(ended, taken, strict=True)] == [True] * ROUNDS
    assert not attempts.running


def test_what_is_released_is_held_no_more(attempts: AttemptRegistry) -> None:
    attempt = an_attempt()
    attempts.held.add(attempt)
    attempts.release(attempt)
    attempts.release(attempt)
    assert attempts.held == set()
