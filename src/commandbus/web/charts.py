"""The geometry of charts that templates draw as SVG. Pure: positions are numbers, texts are escaped by the
templates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from commandbus.flow.limits.detail import LimitBackoff
from commandbus.quick_dataclass import dataclass

WIDTH: Final = 1000.0
HEIGHT: Final = 100.0
TICKS: Final = 6


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


def position(moment: datetime, first: datetime, last: datetime) -> float:
    """Where a moment is on an axis between two others, which is its edge if it lies outside."""
    share = (moment - first).total_seconds() / max((last - first).total_seconds(), 1.0)
    return WIDTH * min(max(share, 0.0), 1.0)


def ticks(first: datetime, last: datetime) -> list[Tick]:
    """Marks at even distances, with the time in UTC."""
    step = (last - first) / TICKS
    moments = [first + number * step for number in range(TICKS)]
    return [Tick(position(moment, first, last), f"{moment.astimezone(UTC):%H:%M}") for moment in moments]
