"""The clock that ends holds: in memory, a moment before the lease, and never one that was renewed."""

from __future__ import annotations

import threading

import pytest

from commandbus.clock import boottime
from commandbus.limits.permit_clock import PermitClock
from commandbus.limits.requests import Permit
from support.waiting import until, within


class Ended:
    """Notes when holds end."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def __call__(self, permit: Permit) -> None:
        self.at[permit.token] = boottime()
        if permit.token == "raises":
            raise ValueError("whoever holds it has a bad day")


def permit(token: str, lease: float, *, age: float = 0.0) -> Permit:
    return Permit("docai", token, lease, holder="x", asked_at=boottime() - age)


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def clock(ended: Ended) -> PermitClock:
    clock = PermitClock("test", ended)
    clock.start()
    return clock


def test_a_hold_ends_before_its_lease(clock: PermitClock, ended: Ended) -> None:
    held = permit("a", 1.0)
    clock.watch(held)
    within(1.0, lambda: "a" in ended.at)
    assert held.renewed_at + 0.8 <= ended.at["a"] <= held.renewed_at + 1.0
    clock.stop()


def test_one_that_is_renewed_goes_on_and_one_that_is_forgotten_is_nobodys(
    clock: PermitClock, ended: Ended
) -> None:
    renewed, forgotten, plain = permit("renewed", 0.5), permit("forgotten", 0.5), permit("plain", 0.5)
    for each in (renewed, forgotten, plain):
        clock.watch(each)
    renewed.renewed_at += 60
    clock.forget(forgotten)
    until(lambda: "plain" in ended.at)
    assert set(ended.at) == {"plain"}
    clock.forget(renewed)
    clock.stop()


def test_what_ran_out_while_the_process_was_stopped_ends_at_once(clock: PermitClock, ended: Ended) -> None:
    for token in ("raises", "other"):
        clock.watch(permit(token, 120.0, age=600.0))
    until(lambda: set(ended.at) == {"raises", "other"})
    clock.stop()


def test_after_the_stop_what_is_held_still_ends_and_then_the_thread(clock: PermitClock, ended: Ended) -> None:
    clock.watch(permit("a", 0.5))
    clock.stop()
    until(lambda: "a" in ended.at)
    until(lambda: not any(thread.name == "test-hold-clock" for thread in threading.enumerate()))
