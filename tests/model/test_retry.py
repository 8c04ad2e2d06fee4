"""Retry: bounds, the schedule's repeating end, the jitter's range, and charge against max_attempts."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.model.durations import LONGEST_SECONDS
from commandbus.model.retry import DEFAULT_SCHEDULE, NO_RULING, RetryPolicy, rule_on

SCHEDULES = st.lists(st.floats(0, LONGEST_SECONDS), max_size=6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"retry_on": "ConnectionError"}, "retry_on must be exception types such as .ConnectionError., not 'Conn"),
        ({"give_up_on": [ValueError, 7]}, "give_up_on must be exception types such as .ConnectionError., not 7"),
        ({"give_up_on": 7}, "give_up_on must be exception types"),
        ({"retry_on": int}, "retry_on must be exception types such as .ConnectionError., not <class 'int'>"),
        ({"delay_from": 5}, "delay_from must be a function of the exception, not 5"),
        ({"on_exhausted": "explode"}, 'on_exhausted must be "troubleshoot" or "fail", not \'explode\''),
        ({"max_snoozes": -1}, "max_snoozes must be a whole number of at least 0, not -1"),
        ({"max_snooze_time": "later"}, "max_snooze_time: 'later' is not a duration"),
    ],
)
def test_bad_rules_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RetryPolicy(**options)


def test_the_lists_decide_by_the_class_of_the_exception() -> None:
    policy = RetryPolicy(retry_on=OSError, give_up_on=[PermissionError])
    assert not rule_on(policy, ConnectionError()).gives_up
    assert rule_on(policy, PermissionError()).gives_up
    assert rule_on(policy, KeyError()).gives_up
    assert rule_on(RetryPolicy(), KeyError()) == NO_RULING


def test_the_defaults_are_those_of_the_readme() -> None:
    policy = RetryPolicy()
    assert (policy.max_attempts, policy.backoff_schedule, policy.jitter) == (3, (10.0, 60.0, 300.0), 0.1)
    assert policy.backoff_schedule == DEFAULT_SCHEDULE


@given(SCHEDULES, st.floats(0, 1), st.integers(-3, 50), st.floats(0, 1, exclude_max=True))
def test_a_delay_is_the_scheduled_one_spread_by_the_jitter(
    schedule: list[float], jitter: float, charge: int, spread: float
) -> None:
    policy = RetryPolicy(backoff_schedule=schedule, jitter=jitter)
    delay = policy.delay_seconds(charge, spread=spread)
    assert math.isfinite(delay)
    assert delay >= 0
    if not schedule:
        assert delay == 0
        return
    base = schedule[min(max(charge, 1), len(schedule)) - 1]
    slack = 1e-9 * (base + 1)
    assert base * (1 - jitter) - slack <= delay <= base * (1 + jitter) + slack


@given(SCHEDULES.filter(bool), st.integers(1, 100))
def test_the_last_value_repeats(schedule: list[float], beyond: int) -> None:
    policy = RetryPolicy(backoff_schedule=schedule, jitter=0)
    delays = [policy.delay_seconds(charge) for charge in range(1, len(schedule) + beyond + 1)]
    assert delays[: len(schedule)] == pytest.approx(schedule)
    assert set(delays[len(schedule) :]) <= {schedule[-1]}


def test_the_middle_of_the_spread_is_the_scheduled_delay() -> None:
    policy = RetryPolicy(backoff_schedule=[10], jitter=0.5)
    assert policy.delay_seconds(1) == 10
    assert policy.delay_seconds(1, spread=0.0) == 5
    assert policy.delay_seconds(1, spread=0.999999) == pytest.approx(15, abs=0.001)


@given(st.integers(1, 1000), st.integers(1, 1000), st.none() | st.integers(1, 1000))
def test_an_attempt_follows_while_the_charge_is_below_the_limit(
    charge: int, of_the_policy: int, of_the_command: int | None
) -> None:
    policy = RetryPolicy(max_attempts=of_the_policy)
    limit = of_the_policy if of_the_command is None else of_the_command
    assert policy.may_retry(charge, max_attempts=of_the_command) == (charge < limit)


def test_exactly_max_attempts_are_charged() -> None:
    policy = RetryPolicy(max_attempts=3)
    charge = 1
    while policy.may_retry(charge):
        charge += 1
    assert charge == 3
    assert not RetryPolicy(max_attempts=1).may_retry(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_attempts", value) for value in (0, -1, True, 1.0, "3", None)),
        *(
            ("backoff_schedule", value)
            for value in (
                "10",
                [-1],
                [math.nan],
                [math.inf],
                [10**400],
                [1e300],
                ["10 parsecs"],
                [None],
                [True],
                None,
                10,
            )
        ),
        *(("jitter", value) for value in (-0.1, 1.1, math.nan, math.inf, "0.1", None)),
    ],
)
def test_a_bad_policy_is_refused_and_the_field_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        RetryPolicy(**{field: value})


def test_a_schedule_takes_durations_in_all_forms() -> None:
    policy = RetryPolicy(backoff_schedule=[1, "10s", timedelta(minutes=5), "200ms"])
    assert policy.backoff_schedule == policy.backoff_seconds == (1.0, 10.0, 300.0, 0.2)
