"""The ledger of a command as shapes of an SVG bar, with its attempts on the same axis, in percent of its width."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from commandbus.model.ledger import Ledger, LedgerAttempt, LedgerState
from commandbus.model.ledger_bar import LegendLine, describe, how_long, legend

MOST_SHAPES: Final = 400
LEAST_WIDTH: Final = 0.3  # percent: something is to be seen, however short it was
NAMED_FROM: Final = 2.0  # percent: a narrower shape has no room for a character


@dataclass(frozen=True, slots=True)
class Shape:
    """A part of the bar, or an attempt below it. `title` says everything; `mark` is drawn if there is room."""

    x: str
    width: str
    middle: str
    title: str
    mark: str
    kind: str


@dataclass(frozen=True, slots=True)
class LedgerChart:
    """What the template draws. `left_out` counts the shortest intervals, which are not drawn."""

    parts: list[Shape]
    attempts: list[Shape]
    legend: list[LegendLine]
    kinds: dict[str, str]
    summary: str
    whole: str
    left_out: int


def chart_of(ledger: Ledger) -> LedgerChart:
    """Returns the shapes of a ledger."""
    drawn = sorted(ledger.intervals, key=lambda item: -item.seconds)[:MOST_SHAPES]
    parts = [
        _shape(ledger, item.start, item.end, describe(item), item.state.mark, item.state)
        for item in sorted(drawn, key=lambda item: item.start)
    ]
    attempts = [
        _shape(ledger, item.start, item.end, _attempt(item), str(item.number), "attempt")
        for item in ledger.attempts[-MOST_SHAPES:]
    ]
    lines = legend(ledger)
    so_far = " so far" if ledger.is_open else ""
    return LedgerChart(
        parts,
        attempts,
        lines,
        {item.label: item.state.value for item in ledger.intervals},
        "; ".join(line.text[2:] for line in lines[: len(LedgerState)]),
        f"{how_long(ledger.seconds)}{so_far}",
        len(ledger.intervals) - len(drawn),
    )


def _shape(ledger: Ledger, start: datetime, end: datetime, title: str, mark: str, kind: str) -> Shape:
    whole = ledger.seconds or 1.0
    x = 100 * (start - ledger.sent_at).total_seconds() / whole
    width = max(LEAST_WIDTH, 100 * (end - start).total_seconds() / whole)
    x = min(x, 100 - width)
    return Shape(
        f"{x:.3f}%", f"{width:.3f}%", f"{x + width / 2:.3f}%", title, mark if width >= NAMED_FROM else "", kind
    )


def _attempt(item: LedgerAttempt) -> str:
    seconds = (item.end - item.start).total_seconds()
    worker = "" if item.worker is None else f", by {item.worker}"
    return (
        f"attempt {item.number}: {(item.verdict or 'runs').lower().replace('_', ' ')}, {how_long(seconds)}{worker}"
    )
