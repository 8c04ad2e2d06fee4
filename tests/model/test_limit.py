"""Limits and rates as they are declared: what is accepted, what is refused, and that both can be written down."""

from __future__ import annotations

import contextlib
import json
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import ConfigurationError
from commandbus.model.limit import BACKOFF_SECONDS, OPTIONS, Limit, Rate, check_limit_name

HOSTILE: list[object] = [
    True, -1, 0, 1.5, 10**7, 10**5000, "", "many", b"5", [], {}, object(), float("nan"), float("inf"),
    "9" * 10_000, "\x00", "\ud800", [[]], timedelta(days=-1),
]  # fmt: skip


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["docai", "a", "a1_b", "x" * 48])
def test_a_name_is_accepted(name: str) -> None:
    assert check_limit_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "Docai", "1a", "_a", "a-b", "a.b", "a/b", "x" * 49, "a\n", "ä", None, 5, b"docai", Unprintable()]
)
def test_another_name_is_refused(name: object) -> None:
    with pytest.raises(ConfigurationError, match="is not the name of a limit: use a lower-case letter") as refused:
        check_limit_name(name)
    assert len(str(refused.value)) < 300


# --- rates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate", "shown"),
    [
        ("2/s", Rate(2, 1), "2/s"),
        ("120/m", Rate(120, 60), "120/m"),
        (" 120 / minute ", Rate(120, 60), "120/m"),
        ("1000/h", Rate(1000, 3600), "1000/h"),
        ("5/10s", Rate(5, 10), "5/10s"),
        ("10/1m30s", Rate(10, 90), "10/90s"),
        ("10/2m", Rate(10, 120), "10/2m"),
        ("0.5/s", Rate(0.5, 1), "0.5/s"),
        ("5/500ms", Rate(5, 0.5), "5/0.5s"),
        ("3/0.25 sec", Rate(3, 0.25), "3/0.25s"),
        ("1/365d", Rate(1, 365 * 86_400), "1/365d"),
        ("10000/s", Rate(10_000, 1), "10000/s"),
        ("1234567/d", Rate(1_234_567, 86_400), "1234567/d"),
        ("5/2 hours", Rate(5, 7200), "5/2h"),
    ],
)
def test_a_rate_is_read_and_shown(text: str, rate: Rate, shown: str) -> None:
    assert Rate.parse(text) == rate
    assert str(rate) == shown
    assert rate.per_second == pytest.approx(rate.count / rate.seconds)


@given(
    count=st.one_of(st.integers(1, 10**6), st.floats(1e-3, 1e6)),
    seconds=st.one_of(st.integers(100, 10**7), st.floats(100, 1e7)),
)
def test_the_text_of_a_rate_is_that_rate(count: float, seconds: float) -> None:
    try:
        rate = Rate(count, seconds)
    except ConfigurationError:
        assert not 3e-8 <= count / seconds <= 10_000
        return
    assert Rate.parse(str(rate)) == rate
    assert "e" not in str(rate)


@pytest.mark.parametrize(
    "value",
    ["", "5", "/s", "5/", "5/10", "5 s", "-5/s", "0/s", "5/0s", "5/fortnight", "1e3/s", "٣/s", "5/s/s", "nan/s",
     "inf/s", "5/0.0001s", "10001/s", "1/400d", "9" * 70 + "/s", "9" * 50 + "/s", 5, 5.0, None, b"5/s", ["5/s"],
     "5/mss", Unprintable()],
)  # fmt: skip
def test_what_is_no_rate_is_refused_with_what_to_write(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"write .*120/m") as refused:
        Rate.parse(value, name="limit 'docai': rate")
    assert str(refused.value).startswith("limit 'docai': rate: ")
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("count", "seconds"),
    [(0, 1), (-1, 1), (1, 0), (1, -1), (True, 1), ("1", 1), (1, None), (float("nan"), 1), (float("inf"), 1),
     (1, float("inf")), (10**400, 1), (1, 1e-9), (1e9, 1)],
)  # fmt: skip
def test_a_rate_made_by_hand_is_checked_too(count: Any, seconds: Any) -> None:
    with pytest.raises(ConfigurationError):
        Rate(count, seconds)


@given(st.text(max_size=80))
def test_any_text_is_a_rate_or_is_refused(text: str) -> None:
    with contextlib.suppress(ConfigurationError):
        assert Rate.parse(text).per_second > 0


# --- limits ----------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_design() -> None:
    limit = Limit("docai", concurrency=5)
    assert (limit.lease, limit.max_wait, limit.tries, limit.burst) == (120.0, 86_400.0, 4, 1)
    assert limit.backoff == BACKOFF_SECONDS == (2.0, 4.0, 8.0, 16.0, 30.0)
    assert (limit.breaker_failures, limit.breaker_reset) == (3, 60.0)
    assert (limit.store, limit.environment, limit.rate, limit.per_second) == (None, None, None, None)


def test_durations_are_seconds_and_the_rate_is_a_rate() -> None:
    limit = Limit(
        "docai", rate="120/m", lease="2m", max_wait=timedelta(hours=1), backoff=["1s", 2, 0.5], breaker_reset="30s"
    )
    assert limit.rate == Rate(120, 60)
    assert limit.per_second == 2.0
    assert (limit.lease_seconds, limit.max_wait_seconds) == (120.0, 3600.0)
    assert (limit.backoff_seconds, limit.breaker_reset_seconds) == ((1.0, 2.0, 0.5), 30.0)
    assert isinstance(limit.backoff, tuple)
    assert hash(limit) == hash(limit.changed())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "limit 'docai' limits nothing: give concurrency=5, rate='120/m', or both"),
        (
            {"concurrency": 0},
            "limit 'docai': concurrency must be a whole number from 1 to 1000000, not 0",
        ),
        ({"concurrency": "5"}, "limit 'docai': concurrency must be a whole number from 1 to 1000000, not '5'"),
        ({"rate": "fast"}, "limit 'docai': rate: 'fast' is not a rate; write 2/s, 120/m, 1000/h or 5/10s"),
        ({"rate": "20000/s"}, "limit 'docai': rate: 20000/s is not a possible rate: write one from 1/365d to "
                              "10000/s, such as 120/m"),
        ({"concurrency": 1, "lease": "0.5s"}, "limit 'docai': lease must be at least 1s, not '0.5s'"),
        ({"concurrency": 1, "breaker_reset": 0}, "limit 'docai': breaker_reset must be at least 100ms, not 0"),
        ({"concurrency": 1, "store": "mysql"},
         "limit 'docai': store must be \"redis\" or \"postgres\", not 'mysql'"),
        ({"concurrency": 1, "environment": "a b"},
         "limit 'docai': environment must be up to 63 letters, digits and any of _ . -, not 'a b'"),
        ({"concurrency": 1, "backoff": []}, "limit 'docai': backoff must be a list of durations such as "
                                            "[2, 4, 8, 16, 30], not []"),
        ({"concurrency": 1, "backoff": [1] * 101}, None),
        ({"concurrency": 1, "max_wait": "soon"}, None),
        ({"concurrency": 1, "tries": None}, None),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_with_limit_option_value_and_remedy(
    options: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Limit("docai", **options)
    assert str(refused.value).startswith("limit 'docai'")
    if message is not None:
        assert str(refused.value) == message


@pytest.mark.parametrize("option", OPTIONS)
def test_hostile_values_are_refused_with_an_error_of_our_own(option: str) -> None:
    for value in HOSTILE:
        options = {"concurrency": 1} | {option: value}
        try:
            Limit("docai", **options)  # type: ignore[arg-type]
        except ConfigurationError as error:
            message = str(error)
            assert option in message
            assert len(message) < 500


durations = st.one_of(
    st.integers(1, 10**6), st.floats(1, 1e6), st.timedeltas(timedelta(seconds=1), timedelta(days=99))
)
limits = st.builds(
    Limit,
    name=st.from_regex(r"[a-z][a-z0-9_]{0,47}", fullmatch=True),
    concurrency=st.integers(1, 10**6),
    rate=st.none() | st.builds(Rate, st.integers(1, 1000), st.integers(1, 10**5)),
    burst=st.integers(1, 10**6),
    lease=durations,
    max_wait=st.none() | durations,
    tries=st.integers(1, 100),
    backoff=st.lists(durations, min_size=1, max_size=8),
    breaker_failures=st.integers(0, 100),
    breaker_reset=durations,
    store=st.sampled_from([None, "postgres", "redis"]),
    environment=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True),
)


@given(limits)
def test_a_limit_can_be_written_as_json_and_read_again(limit: Limit) -> None:
    assert Limit.from_json(limit.name, json.loads(json.dumps(limit.to_json()))) == limit
    assert pickle.loads(pickle.dumps(limit)) == limit


def test_only_what_differs_from_the_defaults_is_written() -> None:
    assert Limit("docai", concurrency=5).to_json() == {"concurrency": 5}
    assert Limit("docai", rate="120/m", backoff=[1]).to_json() == {"rate": "120/m", "backoff": [1.0]}


def test_what_was_changed_at_run_time_counts_before_what_was_declared() -> None:
    declared = Limit("docai", concurrency=5, rate="120/m").to_json()
    assert Limit.from_json("docai", declared, None) == Limit("docai", concurrency=5, rate="120/m")
    override = {"concurrency": None, "rate": "1/s"}
    assert Limit.from_json("docai", declared, override) == Limit("docai", rate="1/s")


def test_an_option_that_there_is_not_is_refused() -> None:
    for make in (lambda: Limit.from_json("docai", {"speed": 5}), lambda: Limit("docai", 5).changed(speed=5)):
        with pytest.raises(
            ConfigurationError, match="limit 'docai': there is no option 'speed'; there are concurrency,"
        ):
            make()
    with pytest.raises(ConfigurationError, match="there is no option 'name'"):
        Limit("docai", 5).changed(name="other")


def test_a_changed_limit_is_checked_again() -> None:
    assert Limit("docai", 5).changed(concurrency=7).concurrency == 7
    with pytest.raises(ConfigurationError, match="limits nothing"):
        Limit("docai", 5).changed(concurrency=None)
