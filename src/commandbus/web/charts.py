"""The geometry of charts that templates draw as SVG. Pure: positions are numbers, texts are escaped by the
templates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from commandbus.flow.limits.detail import LimitBackoff
from commandbus.flow.schedules.timeline import ScheduleTimeline
from commandbus.quick_dataclass import dataclass

WIDTH: Final = 1000.0
HEIGHT: Final = 100.0
TICKS: Final = 6
ROW: Final = 24


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on a time axis."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a chart: a back-off, as wide as it lasted and as high as its step."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    event: LimitBackoff


@dataclass(frozen=True, slots=True)
class BackoffChart:
    """The back-offs of a limit within a span of time."""

    bars: list[Bar]
    ticks: list[Tick]
    hours: int


def backoff_chart(backoffs: Sequence[LimitBackoff], now: datetime, *, hours: int = 24) -> BackoffChart:
    """The last hours. The highest step is as high as the chart."""
    first = now - timedelta(hours=hours)
    shown = [event for event in backoffs if event.at >= first]
    highest = max((event.step for event in shown), default=0) + 1
    bars = []
    for event in shown:
        x = position(event.at, first, now)
        height = HEIGHT * (event.step + 1) / (highest + 1)
        width = min(max(2.0, WIDTH * event.seconds / (hours * 3600)), WIDTH - x)
        kind = "opened" if event.breaker_open else event.answer
        bars.append(Bar(x, HEIGHT - height, max(width, 0.0), height, kind, event))
    return BackoffChart(bars, ticks(first, now), hours)


@dataclass(frozen=True, slots=True)
class Dot:
    """One firing."""

    x: float
    at: datetime


@dataclass(frozen=True, slots=True)
class FiringsRow:
    """A schedule on the timeline: where its firings are, and whether it has missed some."""

    y: int
    name: str
    dots: list[Dot]
    is_paused: bool
    missed: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class FiringsChart:
    """The next firings of all schedules, a row each."""

    rows: list[FiringsRow]
    ticks: list[Tick]
    height: int


def firings_chart(found: ScheduleTimeline) -> FiringsChart:
    """The timeline. Schedules that fire first, or have missed something, come first."""
    ordered = sorted(found.schedules, key=lambda item: (not item.missed, item.firings[:1] or [found.end]))
    rows = [
        FiringsRow(
            ROW * (number + 1),
            f"{item.schedule.domain}/{item.schedule.name}",
            [Dot(position(moment, found.start, found.end), moment) for moment in item.firings],
            item.schedule.is_paused,
            len(item.missed),
            item.has_more,
        )
        for number, item in enumerate(ordered)
    ]
    return FiringsChart(rows, ticks(found.start, found.end), ROW * (len(rows) + 2))


def position(moment: datetime, first: datetime, last: datetime) -> float:
    """Where a moment is on an axis between two others, which is its edge if it lies outside."""
    share = (moment - first).total_seconds() / max((last - first).total_seconds(), 1.0)
    return WIDTH * min(max(share, 0.0), 1.0)


def ticks(first: datetime, last: datetime) -> list[Tick]:
    """Marks at even distances, with the time in UTC."""
    step = (last - first) / TICKS
    moments = [first + number * step for number in range(TICKS)]
    return [Tick(position(moment, first, last), f"{moment.astimezone(UTC):%H:%M}") for moment in moments]
