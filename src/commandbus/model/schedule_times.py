"""When a schedule fires: the instants that a cron expression in a time zone, or an interval, names. Pure.

cronsim says which *local* times an expression names. Which *instants* these are is decided here, where a zone's
clock jumps:

- An expression that names its times (`30 2 * * *`): a local time that the clock skips is the first instant after
  the gap; one that comes twice is the first of the two. So a daily schedule fires once a day, every day.
- An expression whose minute or hour begins with `*` (`*/15 * * * *`) follows the clock: what the clock skips does
  not fire, and what comes twice fires twice. So every 15 minutes means that on every day.

Debian's cron has the same rules. An interval counts elapsed time from 1970-01-01T00:00Z; no zone and no restart
moves it. Instants are aware datetimes in UTC. cronsim and zoneinfo are imported on first use: a worker without
schedules does not pay for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from commandbus.errors import InvalidScheduleError
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.names import shown

if TYPE_CHECKING:
    from cronsim import CronSim

SHORTEST_SECONDS: Final = 1.0
LAST_YEAR: Final = 2999  # of what PostgreSQL and Python can both hold, with room for a zone's offset
LONGEST_CRON: Final = 200
ALIASES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND: Final = timedelta(seconds=1)
_STRIDE: Final = timedelta(hours=12)  # no zone has changed its offset twice within so little time
_LONGEST_GAP: Final = timedelta(hours=26)  # Samoa skipped a whole day
_FIRST_WINDOW: Final = timedelta(minutes=1)


@dataclass(frozen=True)
class ScheduleTimes:
    """The times of a schedule: a cron expression in a zone, or an interval in seconds."""

    cron: str | None = None
    every: float | None = None
    timezone: str = "UTC"

    @classmethod
    def make(cls, cron: object, every: Duration | None, timezone: object) -> ScheduleTimes:
        """Times whose values were checked. Raises InvalidScheduleError that names the value and the remedy."""
        if (cron is None) == (every is None):
            which = "neither cron nor every is given" if cron is None else "cron and every are both given"
            raise InvalidScheduleError(f'{which}; give cron="30 2 * * *" or every="15m"')
        if every is not None:
            if timezone is not None:
                raise InvalidScheduleError(
                    f"timezone {shown(timezone)} is given with every={shown(every)}: an interval counts elapsed "
                    f"time, and no zone changes it; leave timezone out, or give cron"
                )
            return cls(every=_check_every(every))
        made = cls(cron=_check_cron(cron), timezone="UTC" if timezone is None else _check_zone(timezone))
        made._check_comes()
        return made

    @property
    def text(self) -> str:
        """For people: `30 2 * * * Europe/Berlin`, or `every 15m`."""
        from commandbus.model.durations import format_seconds

        return f"every {format_seconds(self.every)}" if self.every is not None else f"{self.cron} {self.timezone}"

    def next_after(self, instant: datetime) -> datetime | None:
        """The first firing after an instant; None if there is none within fifty years, or before the year 3000."""
        return next(self.after(instant), None)

    def after(self, instant: datetime) -> Iterator[datetime]:
        """The firings after an instant, in order."""
        if self.every is not None:
            return self._by_interval(instant)
        return self._by_clock(instant) if self._follows_the_clock else self._by_name(instant)

    def first_after(self, instant: datetime, count: int) -> list[datetime]:
        """The first `count` firings after an instant."""
        return list(islice(self.after(instant), count))

    def newest(self, after: datetime, end: datetime, most: int) -> list[datetime]:
        """The last `most` firings after the one instant, up to and including the other, in order.

        It looks back from `end` step by step, so that years of missed firings cost no more than a few.
        """
        window = _FIRST_WINDOW
        while True:
            start = max(after, end - window)
            found = []
            for instant in self.after(start):
                if instant > end:
                    break
                found.append(instant)
            if len(found) >= most or start == after:
                return found[-most:]
            window *= 8

    # --- intervals --------------------------------------------------------------------------------------------

    def _by_interval(self, instant: datetime) -> Iterator[datetime]:
        step = timedelta(seconds=self.every or 0)
        found = _EPOCH + ((instant - _EPOCH) // step + 1) * step
        while found.year <= LAST_YEAR:
            yield found
            found += step

    # --- cron -------------------------------------------------------------------------------------------------

    @cached_property
    def _zone(self) -> tzinfo:
        return _zone(self.timezone)

    @cached_property
    def _follows_the_clock(self) -> bool:
        minute, hour = self._expression.split()[:2]
        return minute.startswith("*") or hour.startswith("*")

    @property
    def _expression(self) -> str:
        return ALIASES.get(str(self.cron).lower(), str(self.cron))

    def _local_times(self, after: datetime) -> Iterator[datetime]:
        """The local times, without a zone, that the expression names after one of them."""
        for found in _simulated(self._expression, after):
            if found.year > LAST_YEAR:
                return
            yield found

    def _by_name(self, instant: datetime) -> Iterator[datetime]:
        last = instant
        for local in self._local_times(self._local(instant)):
            found = self._first_instant(local)
            if found > last:  # a time that comes twice has been, or several fall into one gap
                last = found
                yield found

    def _first_instant(self, local: datetime) -> datetime:
        found = local.replace(tzinfo=self._zone).astimezone(UTC)
        if self._local(found) == local:
            return found
        # The clock skips it: `found` is some time after the gap.
        return self._change_between(found - _LONGEST_GAP, found)

    def _by_clock(self, instant: datetime) -> Iterator[datetime]:
        """Stretch by stretch, from one change of the zone's offset to the next."""
        start = first = instant
        while True:
            offset = self._offset(first)
            for local in self._local_times((start + offset).replace(tzinfo=None)):
                found = (local - offset).replace(tzinfo=UTC)
                change = self._first_change(first, found)
                if change is not None:
                    # One second before it: the change itself may be a firing.
                    start, first = change - _SECOND, change
                    break
                first = found
                yield found
            else:
                return

    def _first_change(self, start: datetime, until: datetime) -> datetime | None:
        """When the zone's offset first changes after `start`, up to and including `until`; None if it does not."""
        offset = self._offset(start)
        while start < until:
            end = min(start + _STRIDE, until)
            if self._offset(end) != offset:
                return self._change_between(start, end)
            start = end
        return None

    def _change_between(self, start: datetime, end: datetime) -> datetime:
        """The first second at which the offset is that of `end`; at `start` it is another."""
        offset = self._offset(end)
        low, high = int((start - _EPOCH) // _SECOND), int(-((_EPOCH - end) // _SECOND))
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset(_EPOCH + middle * _SECOND) == offset:
                high = middle
            else:
                low = middle
        return _EPOCH + high * _SECOND

    def _local(self, instant: datetime) -> datetime:
        return instant.astimezone(self._zone).replace(tzinfo=None, fold=0)

    def _offset(self, instant: datetime) -> timedelta:
        return instant.astimezone(self._zone).utcoffset() or timedelta(0)

    def _check_comes(self) -> None:
        """Does the expression name any time at all? `0 0 30 2 *` does not."""
        if next(self._local_times(datetime(2000, 1, 1)), None) is None:  # noqa: DTZ001 - a local time
            raise InvalidScheduleError(
                f"cron {shown(self.cron)} names a time that never comes; look at its day and month"
            )


def _simulated(expression: str, after: datetime) -> Iterator[datetime]:
    simulation = _cronsim(expression, after)
    while True:
        try:
            yield next(simulation)
        except (StopIteration, OverflowError):
            return


def _cronsim(expression: str, after: datetime) -> CronSim:
    from cronsim import CronSim

    return CronSim(expression, after)


def _check_every(every: Duration) -> float:
    seconds = parse_seconds(every, name="every", error=InvalidScheduleError)
    if seconds < SHORTEST_SECONDS:
        raise InvalidScheduleError(
            f"every: {shown(every)} is too short; a schedule fires at most once a second, so give 1s or more"
        )
    return round(seconds, 6)


def _check_cron(cron: object) -> str:
    from cronsim import CronSimError

    if not isinstance(cron, str) or not cron.strip() or len(cron) > LONGEST_CRON:
        raise InvalidScheduleError(f"cron {shown(cron)} is not a cron expression; {_FIVE}")
    text = " ".join(cron.split())
    expression = ALIASES.get(text.lower(), text)
    if expression.startswith("@"):
        raise InvalidScheduleError(f"cron {shown(cron)} is not known; known are {', '.join(ALIASES)}")
    fields = expression.split()
    if len(fields) != 5:
        hint = '; for seconds give every="10s"' if len(fields) == 6 else ""
        raise InvalidScheduleError(f"cron {shown(cron)} has {len(fields)} fields; {_FIVE}{hint}")
    try:
        _cronsim(expression, datetime(2000, 1, 1))  # noqa: DTZ001 - a local time
    except (CronSimError, ValueError, AssertionError) as error:
        raise InvalidScheduleError(f"cron {shown(cron)} is not valid: {_reason(error, fields)}; {_FIVE}") from None
    return text


_FIVE: Final = "give five fields: minute, hour, day of month, month, day of week, such as 30 2 * * 1-5"


def _reason(error: Exception, fields: list[str]) -> str:
    """cronsim says "Bad minute": which one?"""
    places = {"minute": 0, "hour": 1, "day-of-month": 2, "month": 3, "day-of-week": 4}
    place = str(error).removeprefix("Bad ")
    return f"bad {place} {fields[places[place]]!r}" if place in places else "a field makes no sense"


def _check_zone(timezone: object) -> str:
    if isinstance(timezone, str) and 0 < len(timezone) <= 100:
        try:
            _zone(timezone)
        except (LookupError, ValueError, OSError):
            pass
        else:
            return timezone
    raise InvalidScheduleError(
        f'timezone {shown(timezone)} is not known; give a name such as "Europe/Berlin" or "UTC"{_near(timezone)}'
    )


def _near(timezone: object) -> str:
    from difflib import get_close_matches
    from zoneinfo import available_timezones

    found = get_close_matches(str(timezone)[:100], sorted(available_timezones()), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


@lru_cache(maxsize=64)
def _zone(name: str) -> tzinfo:
    from zoneinfo import ZoneInfo

    return UTC if name == "UTC" else ZoneInfo(name)
