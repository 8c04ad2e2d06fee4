"""When schedules fire: zones whose clocks jump, year ends, leap days, intervals; and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from commandbus import InvalidScheduleError, ScheduleTimes

# zone, expression, after (local), the next firings: local time and offset
ZOO: list[tuple[str, str, str, str, list[str]]] = [
    # Nonexistent: the first instant after the gap, once. On the next day as usual.
    ("Berlin's gap", "Europe/Berlin", "30 2 * * *", "2026-03-28T12:00",
     ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
    ("Berlin's gap, several", "Europe/Berlin", "0,30 2 * * *", "2026-03-28T12:00",
     ["2026-03-29T03:00+02:00", "2026-03-30T02:00+02:00", "2026-03-30T02:30+02:00"]),
    ("Berlin's gap and the hour after it", "Europe/Berlin", "0 2,3 * * *", "2026-03-28T12:00",
     ["2026-03-29T03:00+02:00", "2026-03-30T02:00+02:00", "2026-03-30T03:00+02:00"]),
    ("Berlin's gap by the clock", "Europe/Berlin", "*/30 2 * * *", "2026-03-28T12:00",
     ["2026-03-30T02:00+02:00", "2026-03-30T02:30+02:00"]),
    ("Berlin's gap, hourly", "Europe/Berlin", "0 * * * *", "2026-03-29T00:30",
     ["2026-03-29T01:00+01:00", "2026-03-29T03:00+02:00", "2026-03-29T04:00+02:00"]),
    # Doubled: the first of the two; by the clock, both.
    ("Berlin's doubled hour", "Europe/Berlin", "30 2 * * *", "2026-10-24T12:00",
     ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
    ("Berlin's doubled hour by the clock", "Europe/Berlin", "*/30 * * * *", "2026-10-25T01:45",
     ["2026-10-25T02:00+02:00", "2026-10-25T02:30+02:00", "2026-10-25T02:00+01:00", "2026-10-25T02:30+01:00",
      "2026-10-25T03:00+01:00"]),
    ("New York's gap", "America/New_York", "15 2 * * *", "2026-03-07T12:00",
     ["2026-03-08T03:00-04:00", "2026-03-09T02:15-04:00"]),
    ("New York's doubled hour", "America/New_York", "30 1 * * *", "2026-10-31T12:00",
     ["2026-11-01T01:30-04:00", "2026-11-02T01:30-05:00"]),
    ("Lord Howe's half hour", "Australia/Lord_Howe", "15 2 * * *", "2026-10-03T12:00",
     ["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"]),
    ("Lord Howe, later that day", "Australia/Lord_Howe", "*/20 5 * * *", "2026-10-03T12:00",
     ["2026-10-04T05:00+11:00", "2026-10-04T05:20+11:00", "2026-10-04T05:40+11:00"]),
    ("Lord Howe's doubled half hour", "Australia/Lord_Howe", "*/15 * * * *", "2026-04-05T01:20",
     ["2026-04-05T01:30+11:00", "2026-04-05T01:45+11:00", "2026-04-05T01:30+10:30", "2026-04-05T01:45+10:30",
      "2026-04-05T02:00+10:30"]),
    ("Chatham's gap at 2:45", "Pacific/Chatham", "0 3 * * *", "2026-09-26T12:00",
     ["2026-09-27T03:45+13:45", "2026-09-28T03:00+13:45"]),
    ("Chatham's doubled hour", "Pacific/Chatham", "50 2 * * *", "2026-04-04T12:00",
     ["2026-04-05T02:50+13:45", "2026-04-06T02:50+12:45"]),
    ("Troll's two hours", "Antarctica/Troll", "30 1,2 * * *", "2026-03-28T12:00",
     ["2026-03-29T03:00+02:00", "2026-03-30T01:30+02:00", "2026-03-30T02:30+02:00"]),
    ("Troll's doubled two hours", "Antarctica/Troll", "0 * * * *", "2026-10-25T00:30",
     ["2026-10-25T01:00+02:00", "2026-10-25T02:00+02:00", "2026-10-25T01:00+00:00", "2026-10-25T02:00+00:00"]),
    ("São Paulo had no midnight", "America/Sao_Paulo", "0 0 * * *", "2017-10-14T12:00",
     ["2017-10-15T01:00-02:00", "2017-10-16T00:00-02:00"]),
    ("São Paulo had midnight twice", "America/Sao_Paulo", "30 23 * * *", "2018-02-17T12:00",
     ["2018-02-17T23:30-02:00", "2018-02-18T23:30-03:00"]),
    ("Samoa's lost day", "Pacific/Apia", "0 12 * * *", "2011-12-29T00:00",
     ["2011-12-29T12:00-10:00", "2011-12-31T00:00+14:00", "2011-12-31T12:00+14:00"]),
    ("Samoa's lost day by the clock", "Pacific/Apia", "0 */12 * * *", "2011-12-29T00:00",
     ["2011-12-29T12:00-10:00", "2011-12-31T00:00+14:00", "2011-12-31T12:00+14:00"]),
    ("a year's end", "Europe/Berlin", "59 23 31 12 *", "2026-01-01T00:00",
     ["2026-12-31T23:59+01:00", "2027-12-31T23:59+01:00"]),
    ("a year's beginning", "Pacific/Kiritimati", "@yearly", "2026-12-31T23:59",
     ["2027-01-01T00:00+14:00", "2028-01-01T00:00+14:00"]),
    ("29 February", "Europe/Berlin", "0 3 29 2 *", "2024-02-29T03:00",
     ["2028-02-29T03:00+01:00", "2032-02-29T03:00+01:00"]),
    ("29 February of 2000, none of 2100", "UTC", "0 0 29 2 *", "2096-03-01T00:00", ["2104-02-29T00:00+00:00"]),
    ("the last day of a month", "UTC", "0 0 L * *", "2026-02-01T00:00",
     ["2026-02-28T00:00+00:00", "2026-03-31T00:00+00:00"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("zone", "cron", "after", "expected"), [case[1:] for case in ZOO], ids=[c[0] for c in ZOO]
)
def test_the_zoo_of_zones(zone: str, cron: str, after: str, expected: list[str]) -> None:
    times = ScheduleTimes.make(cron, None, zone)
    start = datetime.fromisoformat(after).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    found = times.first_after(start, len(expected))
    assert [item.astimezone(ZoneInfo(zone)).isoformat("T", "minutes") for item in found] == expected
    assert [times.next_after(item - timedelta(microseconds=1)) for item in found] == found
    assert times.newest(start, found[-1], len(found)) == found


def test_from_within_a_doubled_hour_nothing_fires_twice_or_is_left_out() -> None:
    times = ScheduleTimes.make("30 2 * * *", None, "Europe/Berlin")
    second = datetime(2026, 10, 25, 1, 15, tzinfo=UTC)  # 2:15 for the second time
    assert times.next_after(second) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)
    assert times.newest(second - timedelta(days=1), second, 5) == [datetime(2026, 10, 25, 0, 30, tzinfo=UTC)]


JUMPS = [
    ("Europe/Berlin", "2026-03-29T01:00Z"), ("Europe/Berlin", "2026-10-25T01:00Z"),
    ("America/New_York", "2026-03-08T07:00Z"), ("America/New_York", "2026-11-01T06:00Z"),
    ("Australia/Lord_Howe", "2026-10-03T15:30Z"), ("Australia/Lord_Howe", "2026-04-04T15:00Z"),
    ("Pacific/Chatham", "2026-09-26T14:00Z"), ("Pacific/Chatham", "2026-04-04T14:00Z"),
    ("Antarctica/Troll", "2026-03-29T01:00Z"), ("Antarctica/Troll", "2026-10-25T01:00Z"),
    ("America/Sao_Paulo", "2017-10-15T03:00Z"), ("America/Sao_Paulo", "2018-02-18T02:00Z"),
    ("Pacific/Apia", "2011-12-30T10:00Z"), ("UTC", "2026-01-01T00:00Z"),
]  # fmt: skip
MINUTES = st.sampled_from(["*", "*/7", "*/20", "0", "13", "0,30", "5-50/15"])
HOURS = st.sampled_from(["*", "*/3", "0", "1", "2", "3", "1-4", "0,12,23"])


@settings(max_examples=80, deadline=None)
@given(jump=st.sampled_from(JUMPS), minute=MINUTES, hour=HOURS, before=st.integers(-300, 300))
def test_around_every_jump_it_fires_as_a_look_at_every_minute_says(
    jump: tuple[str, str], minute: str, hour: str, before: int
) -> None:
    zone, begin = ZoneInfo(jump[0]), datetime.fromisoformat(jump[1]) - timedelta(minutes=before)
    end = begin + timedelta(hours=6)
    looks = [begin + timedelta(minutes=n) for n in range(-300, 361)]
    shown = [(look, look.astimezone(zone).replace(tzinfo=None, fold=0)) for look in looks]
    match = CronSim(f"{minute} {hour} * * *", begin)

    def is_named(local: datetime) -> bool:
        return local.minute in match.minutes and local.hour in match.hours

    if minute.startswith("*") or hour.startswith("*"):
        expected = {look for look, local in shown if is_named(local)}
    else:
        first: dict[datetime, datetime] = {}
        for look, local in shown:
            first.setdefault(local, look)
        for (_, local), (look, following) in pairwise(shown):
            skipped = int((following - local) / timedelta(minutes=1))
            first |= {local + timedelta(minutes=n): look for n in range(1, skipped)}
        expected = {look for local, look in first.items() if is_named(local)}
    times = ScheduleTimes.make(f"{minute} {hour} * * *", None, jump[0])
    found = [item for item in times.first_after(begin, 400) if item <= end]
    assert found == sorted(item for item in expected if begin < item <= end)


def test_intervals_count_elapsed_time_from_the_epoch() -> None:
    after = datetime(2026, 3, 29, 0, 50, 1, tzinfo=UTC)
    assert ScheduleTimes.make(None, "15m", None).first_after(after, 2) == [
        datetime(2026, 3, 29, 1, 0, tzinfo=UTC),
        datetime(2026, 3, 29, 1, 15, tzinfo=UTC),
    ]
    odd = ScheduleTimes.make(None, 1.5, None)
    assert odd.next_after(datetime(1970, 1, 1, 0, 0, 3, tzinfo=UTC)) == datetime(
        1970, 1, 1, 0, 0, 4, 500_000, tzinfo=UTC
    )
    assert odd.next_after(datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC)) is None


@pytest.mark.parametrize("times", [("* * * * *", None, "Europe/Berlin"), (None, "1s", None)])
def test_years_of_missed_firings_cost_little(times: Any) -> None:
    found = ScheduleTimes.make(*times)
    looked = iter(range(10_000))
    counting = ScheduleTimes.after

    class Counted(ScheduleTimes):
        def after(self, instant: datetime) -> Any:
            for item in counting(self, instant):
                next(looked)  # runs out if there are too many
                yield item

    end = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    counted = Counted(found.cron, found.every, found.timezone)
    newest = counted.newest(datetime(1990, 1, 1, tzinfo=UTC), end, 11)
    assert len(newest) == 11
    assert newest[-1] <= end < (found.next_after(newest[-1]) or end)


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "neither cron nor every is given; give cron="),
    ({"cron": "* * * * *", "every": 60}, "cron and every are both given; give cron="),
    ({"cron": "* * * *"}, r"cron '\* \* \* \*' has 4 fields; give five fields"),
    ({"cron": "* * * * * *"}, r"has 6 fields; give five fields.*for seconds give every"),
    ({"cron": "61 * * * *"}, r"cron '61 \* \* \* \*' is not valid: bad minute '61'; give five"),
    ({"cron": "0 25 * * *"}, "bad hour '25'"),
    ({"cron": "0 0 32 * *"}, "bad day-of-month '32'"),
    ({"cron": "0 0 * 13 *"}, "bad month '13'"),
    ({"cron": "0 0 * * FUN"}, "bad day-of-week 'FUN'"),
    ({"cron": "*/0 * * * *"}, r"bad minute '\*/0'"),
    ({"cron": "0 0 30 2 *"}, "30 2"),
    ({"cron": "@reboot"}, "'@reboot' is not known; known are @hourly"),
    ({"cron": ""}, "cron '' is not a cron expression"),
    ({"cron": 5}, "cron 5 is not a cron expression"),
    ({"cron": "0 0 " + "1," * 200 + "1 * *"}, "is not a cron expression"),
    ({"cron": "0 0 * * *", "timezone": "Europe/Berln"}, "Berln' is not known.*did you mean 'Europe/Berlin'"),
    ({"cron": "0 0 * * *", "timezone": "../../etc/passwd"}, "is not known"),
    ({"cron": "0 0 * * *", "timezone": "/etc/localtime"}, "is not known"),
    ({"cron": "0 0 * * *", "timezone": ""}, "timezone '' is not known"),
    ({"cron": "0 0 * * *", "timezone": 5}, "timezone 5 is not known"),
    ({"every": 60, "timezone": "UTC"}, "timezone 'UTC' is given with every=60.*leave timezone out"),
    ({"every": 0}, "every: 0 is too short.*give 1s or more"),
    ({"every": "10ms"}, "every: '10ms' is too short"),
    ({"every": -5}, "every: -5 is negative"),
    ({"every": "soon"}, "every: 'soon' is not a duration"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), BAD)
def test_bad_times_are_refused_with_value_and_remedy(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidScheduleError, match=said):
        ScheduleTimes.make(given.get("cron"), given.get("every"), given.get("timezone"))
