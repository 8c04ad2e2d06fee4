"""Small charts of an hour, as SVG: fixed attributes and classes, no style. What is not known is a gap.

The label says in words what the line shows, so that nobody needs to see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from markupsafe import Markup, escape

from commandbus.model.ledger_bar import how_long
from commandbus.model.minute_figures import HourFigures, MinuteFigures
from commandbus.model.safe_text import escaped

WIDTH: Final = 120
HEIGHT: Final = 24
_EDGE: Final = 2
_UNKNOWN: Final = Markup('<span class="unknown">no figures yet</span>')


def settled(hour: HourFigures | None) -> Markup:
    """How many were settled, minute by minute."""
    return _chart(hour, "settled per minute", lambda minute: minute.settled, _count)


def ready(hour: HourFigures | None) -> Markup:
    """How many could run."""
    return _chart(hour, "ready", lambda minute: minute.ready, _count)


def waits(hour: HourFigures | None) -> Markup:
    """How long 99 of 100 commands waited at most."""
    return _chart(hour, "wait, 99%", lambda minute: minute.wait_p99, how_long)


def _count(value: float) -> str:
    return f"{value:.0f}"


def _chart(
    hour: HourFigures | None,
    name: str,
    figure: Callable[[MinuteFigures], float | None],
    shown: Callable[[float], str],
) -> Markup:
    values = [] if hour is None else [figure(minute) for minute in hour.minutes]
    known = [value for value in values if value is not None]
    if hour is None or not known:
        return _UNKNOWN
    label = f"{name} in the last hour: last {shown(known[-1])}, most {shown(max(known))}"
    gaps = len(values) - len(known)
    if gaps:
        label += f", not known for {gaps} of {len(values)} minutes"
    parts = Markup("").join([_axis(), *_lines(values, max(known)), *_marks(hour)])
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(WIDTH, HEIGHT, label, label, parts)


def _axis() -> Markup:
    """The whole hour, so that a line that begins late is seen to begin late."""
    return Markup('<line class="spark-axis" x1="0" y1="{0}" x2="{1}" y2="{0}"/>').format(HEIGHT - 0.5, WIDTH)


def _lines(values: Sequence[float | None], most: float) -> list[Markup]:
    """A line for each stretch that is known; a dot for one minute alone."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for number, value in enumerate(values):
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append((_x(number, len(values)), _y(value, most)))
    return [_line(points) for points in stretches if points]


def _line(points: Sequence[tuple[float, float]]) -> Markup:
    if len(points) == 1:
        ((x, y),) = points
        return Markup('<circle class="spark-line" cx="{:.1f}" cy="{:.1f}" r="1.2"/>').format(x, y)
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Markup('<polyline class="spark-line" points="{}"/>').format(text)


def _marks(hour: HourFigures) -> list[Markup]:
    first = hour.minutes[0].at
    return [
        Markup(
            '<line class="spark-mark" x1="{0:.1f}" y1="0" x2="{0:.1f}" y2="{1}"><title>{2}</title></line>'
        ).format(_moment(mark.at, first, len(hour.minutes)), HEIGHT, escape(f"version {escaped(mark.version)}"))
        for mark in hour.marks
    ]


def _moment(at: datetime, first: datetime, minutes: int) -> float:
    return min(float(WIDTH), _x((at - first).total_seconds() / 60, minutes))


def _x(number: float, count: int) -> float:
    return _EDGE + number * (WIDTH - 2 * _EDGE) / max(1, count - 1)


def _y(value: float, most: float) -> float:
    return HEIGHT - _EDGE - (value / most if most else 0.0) * (HEIGHT - 2 * _EDGE)
