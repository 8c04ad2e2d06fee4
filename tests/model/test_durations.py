"""Durations: every way of writing one, and what is refused."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commandbus.model.durations import LONGEST_SECONDS, format_seconds, parse_seconds, roughly


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (25, 25.0),
        (0, 0.0),
        (0.5, 0.5),
        (-0.0, 0.0),
        ("25", 25.0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("25s", 25.0),
        (" 25 s ", 25.0),
        ("500ms", 0.5),
        ("5ms", 0.005),
        ("0s", 0.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1d", 86_400.0),
        ("1m30s", 90.0),
        ("1m 30s", 90.0),
        ("1m5ms", 60.005),
        ("1d2h3m4s5ms", 93_784.005),
        ("1.5h", 5400.0),
        (timedelta(minutes=2), 120.0),
        (timedelta(milliseconds=1), 0.001),
    ],
)
def test_a_duration_can_be_written_in_many_ways(value: str | float | timedelta, seconds: float) -> None:
    assert parse_seconds(value, name="grace") == pytest.approx(seconds, abs=1e-9)


def test_minus_zero_is_zero() -> None:
    assert math.copysign(1, parse_seconds(-0.0, name="grace")) == 1


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "s", "ms", "25x", "25 sec", "1M", "1e3", "1_000", "0x10", "+5", "--5", "5 5", "30s1m",
        "1s1s", "nan", "inf", "٣s", "1,5", ".", "1" * 100, True, False, math.nan, None, [25], b"25",
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_name_value_and_what_is_accepted(value: object) -> None:
    with pytest.raises(ValueError, match=r"^grace: .* is not a duration; give seconds .*500ms.*1m30s") as refused:
        parse_seconds(value, name="grace")  # type: ignore[arg-type]
    assert repr(value)[:40] in str(refused.value)


@pytest.mark.parametrize("value", [-1, -0.001, "-5", "-5s", "-1m30s", timedelta(seconds=-1), -math.inf, -(10**30)])
def test_negative_durations_are_refused(value: str | float | timedelta) -> None:
    with pytest.raises(ValueError, match=r"^grace: .* is negative"):
        parse_seconds(value, name="grace")


@pytest.mark.parametrize(
    "value", [math.inf, 10**9, 1e300, "3653d", "9" * 60, "9" * 60 + "d", timedelta(days=4000)]
)
def test_more_than_ten_years_is_refused(value: str | float | timedelta) -> None:
    with pytest.raises(ValueError, match=r"^grace: .* is longer than ten years") as refused:
        parse_seconds(value, name="grace")
    assert len(str(refused.value)) < 300


def test_a_number_too_long_to_print_is_refused_all_the_same() -> None:
    with pytest.raises(ValueError, match=r"^grace: a number of more than 18 digits is longer than ten years"):
        parse_seconds(10**5000, name="grace")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0000001, "0s"),
        (0.0005, "0.5ms"),
        (0.5, "500ms"),
        (0.9999, "999.9ms"),
        (0.9999999, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (25, "25s"),
        (59.9999, "1m"),
        (60, "1m"),
        (90, "1m30s"),
        (3600, "1h"),
        (3661.25, "1h1m1.25s"),
        (30 * 86_400, "30d"),
        (25_000, "6h56m40s"),
        (-90, "-1m30s"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_people_read_durations_in_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(min_value=0, max_value=LONGEST_SECONDS - 1))
@example(59.9995)
@example(0.9999995)
def test_what_is_shown_can_be_given_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds), name="any") == pytest.approx(seconds, abs=0.0006)


@given(st.integers(min_value=0, max_value=int(LONGEST_SECONDS) * 1000))
def test_milliseconds_survive_the_round_trip_exactly(milliseconds: int) -> None:
    text = format_seconds(milliseconds / 1000)
    assert round(parse_seconds(text, name="any") * 1000) == milliseconds
    assert format_seconds(parse_seconds(text, name="any")) == text


@given(st.text(alphabet="0123456789.smhd -+enaif", max_size=80))
def test_any_text_is_either_a_sane_duration_or_a_value_error_with_the_name(text: str) -> None:
    try:
        seconds = parse_seconds(text, name="grace")
    except ValueError as error:
        refused = str(error)
        assert refused.startswith("grace: ")
    else:
        assert 0 <= seconds <= LONGEST_SECONDS


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "1 s"), (0, "1 s"), (0.4, "1 s"), (13.6, "14 s"), (59.4, "59 s"), (59.6, "1m"), (130.2, "2m10s"),
        (3600, "1h"), (11_111, "3h5m"), (90_000, "1d1h"),
    ],
)  # fmt: skip
def test_what_nobody_knows_exactly_is_not_told_exactly(seconds: float, text: str) -> None:
    assert roughly(seconds) == text
