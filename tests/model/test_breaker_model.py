"""Breakers of command types as they are declared."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import ConfigurationError
from commandbus.model.breaker import OPTIONS, Breaker


def test_the_defaults_are_five_stuck_attempts_within_an_hour_and_one_minute() -> None:
    breaker = Breaker()
    assert (breaker.stuck, breaker.failures, breaker.on_open) == (5, 0, "park")
    assert (breaker.window_seconds, breaker.reset_seconds) == (3600.0, 60.0)
    assert breaker == Breaker(window="60m", reset="60s") == Breaker(window=timedelta(hours=1))
    assert not breaker.is_off
    assert not breaker.refuses


def test_a_breaker_can_be_off() -> None:
    assert Breaker.off() == Breaker(stuck=0, failures=0)
    assert Breaker.off().is_off
    assert not Breaker(stuck=0, failures=1).is_off
    assert Breaker(on_open="refuse").refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stuck": -1}, "breaker: stuck must be a whole number from 1 to 1000, or 0 for not counted, not -1"),
        ({"failures": 1001}, "breaker: failures must be a whole number from 1 to 1000, or 0 for not counted, not "
                             "1001"),
        ({"stuck": True}, "breaker: stuck must be a whole number from 1 to 1000, or 0 for not counted, not True"),
        ({"window": 0}, "breaker: window must be at least 100ms, not 0"),
        ({"reset": "0.01s"}, "breaker: reset must be at least 100ms, not '0.01s'"),
        ({"on_open": "fail"}, "breaker: on_open must be \"park\" or \"refuse\", not 'fail'"),
        ({"on_open": ["park"]}, "breaker: on_open must be \"park\" or \"refuse\", not ['park']"),
        ({"window": "soon"}, None),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_with_its_value_and_what_to_write(
    options: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Breaker(**options)
    assert str(refused.value) == message or message is None
    assert "breaker: " in str(refused.value)


@pytest.mark.parametrize("option", OPTIONS)
def test_hostile_values_are_refused_with_an_error_of_our_own(option: str) -> None:
    hostile = [None, 1.5, 10**5000, "", "\x00", b"", [], {}, object(), float("nan"), float("-inf"), "9" * 10_000]
    for value in hostile:
        try:
            Breaker(**{option: value})  # type: ignore[arg-type]
        except ConfigurationError as error:
            message = str(error)
            assert option in message
            assert len(message) < 300


@given(
    st.builds(
        Breaker,
        stuck=st.integers(0, 1000),
        failures=st.integers(0, 1000),
        window=st.floats(0.1, 1e6),
        reset=st.integers(1, 10**6),
        on_open=st.sampled_from(["park", "refuse"]),
    )
)
def test_a_breaker_can_be_written_as_json_and_read_again(breaker: Breaker) -> None:
    assert Breaker.from_json(json.loads(json.dumps(breaker.to_json()))) == breaker
    assert pickle.loads(pickle.dumps(breaker)) == breaker


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="breaker: there is no option 'stick'; there are stuck, failures,"
    ):
        Breaker.from_json({"stick": 3})
