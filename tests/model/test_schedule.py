"""Which firings of a due schedule are made, by its policies; and what a definition is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from commandbus import InvalidCommandError, InvalidScheduleError, Schedule, ScheduleTimes
from commandbus.model.schedule import Due, command_id_of, decide

HOURLY = ScheduleTimes.make("0 * * * *", None, None)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def hour(n: int) -> datetime:
    return NOON + timedelta(hours=n)


def due(now: datetime, *, missed: str = "run_once", overlap: str = "allow", most: int = 100, **more: Any) -> Due:
    return Due(HOURLY, missed, overlap, most, NOON, now, **more)


def moment(n: int, **late: int) -> datetime:
    return hour(n) + timedelta(**late)


@pytest.mark.parametrize("missed", ["skip", "run_once", "run_all"])
def test_a_firing_on_time(missed: str) -> None:
    made = decide(due(moment(1, milliseconds=5), missed=missed))
    assert (made.firings, made.passed_at, made.next_at, made.note) == ((hour(1),), hour(1), hour(2), None)


@pytest.mark.parametrize(
    ("missed", "most", "firings", "note"),
    [
        ("skip", 100, [], "5 firings from 2026-01-01T13:00:00Z to 2026-01-01T17:00:00Z were missed"),
        ("run_once", 100, [5], "4 firings from 2026-01-01T13:00:00Z to 2026-01-01T16:00:00Z were missed"),
        ("run_all", 100, [1, 2, 3, 4, 5], None),
        ("run_all", 2, [4, 5], "3 firings from 2026-01-01T13:00:00Z to 2026-01-01T15:00:00Z were missed"),
    ],
)
def test_missed_firings_by_policy(missed: str, most: int, firings: list[int], note: str | None) -> None:
    made = decide(due(moment(5, minutes=30), missed=missed, most=most))
    assert (made.firings, made.note) == (tuple(map(hour, firings)), note)
    assert (made.passed_at, made.next_at) == (hour(5), hour(6))


def test_a_firing_that_is_a_minute_late_is_missed() -> None:
    assert decide(due(moment(1, seconds=59), missed="skip")).firings == (hour(1),)
    made = decide(due(moment(1, seconds=60), missed="skip"))
    assert (made.firings, made.note) == ((), "the firing of 2026-01-01T13:00:00Z was missed")


def test_many_missed_firings_are_not_counted_to_the_last() -> None:
    made = decide(due(moment(24 * 365, minutes=30)))
    assert made.firings == (hour(24 * 365),)
    assert made.note == "more than 9 firings up to 2027-01-01T11:00:00Z were missed"
    assert len(decide(due(moment(24 * 365), missed="run_all", most=1000)).firings) == 1000


@pytest.mark.parametrize("status", [None, "COMPLETED", "FAILED", "CANCELED"])
@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_nothing_overlaps_with_a_command_that_has_ended(overlap: str, status: str | None) -> None:
    made = decide(due(hour(1), overlap=overlap, last_status=status))
    assert (made.firings, made.warns) == ((hour(1),), False)


def test_while_the_last_command_is_unfinished() -> None:
    assert decide(due(hour(1), last_status="PENDING")).firings == (hour(1),)
    skipped = decide(due(hour(1), overlap="skip", last_status="PENDING"))
    assert (skipped.firings, skipped.passed_at, skipped.next_at, skipped.skipped) == ((), hour(1), hour(2), 1)
    assert skipped.note == "the firing of 2026-01-01T13:00:00Z was skipped: the last command is unfinished"
    waits = decide(due(hour(1), overlap="queue", last_status="PENDING"))
    assert (waits.firings, waits.passed_at, waits.waiting_since) == ((), NOON, hour(1))
    assert waits.next_at == hour(1) + timedelta(seconds=1)


def test_a_firing_that_waited_is_not_missed_however_long_it_waited() -> None:
    made = decide(due(moment(1, minutes=50), missed="skip", overlap="queue", waiting_since=hour(1)))
    assert (made.firings, made.waiting_since) == ((hour(1),), None)


def test_queued_firings_come_one_after_the_other_if_all_are_to_run() -> None:
    first = decide(due(moment(3), missed="run_all", overlap="queue"))
    assert (first.firings, first.passed_at) == ((hour(1),), hour(1))
    assert first.next_at == hour(3) + timedelta(seconds=1)
    last = decide(due(moment(3), missed="run_all", overlap="queue")._replace(passed_at=hour(2)))
    assert (last.firings, last.next_at, last.waiting_since) == ((hour(3),), hour(4), None)
    assert decide(due(moment(3), overlap="queue")).firings == (hour(3),)


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_a_command_in_troubleshooting_counts_as_finished_and_warns(overlap: str) -> None:
    made = decide(due(hour(1), overlap=overlap, last_status="IN_TROUBLESHOOTING_QUEUE"))
    assert (made.firings, made.warns) == ((hour(1),), True)
    assert made.note == "fired, although the last command is in the troubleshooting queue"


def test_a_clock_that_steps_back_fires_nothing_again() -> None:
    made = decide(due(NOON - timedelta(hours=3)))
    assert (made.firings, made.passed_at) == ((), NOON)


def test_the_id_of_a_command_names_schedule_and_instant() -> None:
    assert command_id_of("nightly", NOON) == "schedule:nightly@2026-01-01T12:00:00Z"
    assert command_id_of("x" * 100, NOON + timedelta(microseconds=1)).endswith("12:00:00.000001Z")


def test_a_definition_makes_the_same_schedule_again() -> None:
    made = Schedule("orders", "nightly", cron=" 30  2 * * * ", timezone="Europe/Berlin", data={"b": 1, "a": [2]},
                    headers={"x": 1}, timeout="2m", missed="run_all", most=7, overlap="queue")  # fmt: skip
    assert made.definition() == {
        "cron": "30 2 * * *", "timezone": "Europe/Berlin", "command_type": "nightly", "data": {"b": 1, "a": [2]},
        "headers": {"x": 1}, "timeout": 120.0, "missed": "run_all", "overlap": "queue", "most": 7,
    }  # fmt: skip
    again = Schedule("orders", "nightly", **made.definition())
    assert again == made
    assert again.fingerprint() == made.fingerprint()
    turned = Schedule("orders", "nightly", **made.definition() | {"data": {"a": [2], "b": 1}})
    assert turned.fingerprint() == made.fingerprint()
    for change in ({"data": {"b": True, "a": [2]}}, {"cron": "31 2 * * *"}, {"most": 8}, {"timeout": None}):
        assert Schedule("orders", "nightly", **made.definition() | change).fingerprint() != made.fingerprint()
    interval = Schedule("orders", "often", every="15m")
    assert interval.definition() == {"every": 900.0, "command_type": "often"}
    assert Schedule("orders", "often", **interval.definition()) == interval


def test_next_firings_of_a_schedule_that_nobody_has_created() -> None:
    nightly = Schedule("orders", "nightly", cron="30 2 * * *", timezone="Europe/Berlin")
    assert nightly.next_firings(2, after=NOON) == [
        datetime(2026, 1, 2, 1, 30, tzinfo=UTC),
        datetime(2026, 1, 3, 1, 30, tzinfo=UTC),
    ]
    assert nightly.next_firings(1)[0] > datetime.now(UTC)
    with pytest.raises(InvalidScheduleError, match="after must be a datetime with a time zone"):
        nightly.next_firings(after=NOON.replace(tzinfo=None))
    with pytest.raises(InvalidCommandError, match="count must be a whole number from 1 to 1000, not 0"):
        nightly.next_firings(0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"domain": "Orders"}, "domain 'Orders' is not a domain name"),
        ({"name": "a b"}, "schedule name 'a b' is not valid: use at most 100 letters"),
        ({"name": "x" * 101}, "schedule name 'xxx"),
        ({"name": ""}, "schedule name '' is not valid"),
        ({"name": None}, "schedule name None is not valid"),
        ({"command_type": ""}, "command_type '' is not valid"),
        ({"data": {1, 2}}, "data is not JSON"),
        ({"data": float("nan")}, "data is not JSON"),
        ({"headers": {"schedule": "x"}}, "headers has the key 'schedule', which each firing sets"),
        ({"reply_to": "No Queue"}, "reply_to 'No Queue' is not a queue name"),
        ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 1000000, not 0"),
        ({"timeout": -1}, "timeout: -1 is negative"),
        ({"expires": 0}, "expires: 0 leaves no time to start"),
        ({"expires": NOON}, r"expires: .* is not a duration"),
        ({"on_exhausted": "cry"}, "on_exhausted"),
        ({"missed": "some"}, 'missed must be one of "skip", "run_once", "run_all", not \'some\''),
        ({"overlap": None}, 'overlap must be one of "allow", "skip", "queue", not None'),
        ({"most": 0}, "most must be a whole number from 1 to 1000, not 0"),
        ({"missed": "run_all", "overlap": "skip"}, "contradict each other"),
        ({"every": 60}, "cron and every are both given"),
    ],
)
def test_bad_schedules_are_refused_with_the_value(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidCommandError, match=said):
        Schedule(**{"domain": "orders", "name": "nightly", "cron": "30 2 * * *"} | given)
