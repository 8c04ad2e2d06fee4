"""The progress of a batch: on a terminal a bar that is redrawn in place, elsewhere a line per change.

The bar needs only the carriage return of a terminal: an old line is overwritten with spaces.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from commandbus.cli.render import age, say
from commandbus.cli.table import GAP, fitted
from commandbus.model.batch import BatchRecord

Show = Callable[[BatchRecord], None]
LONGEST_BAR = 40
SHORTEST_BAR = 5


@contextmanager
def bar() -> Iterator[Show]:
    """Draw the bar again and again. However that ends, later output begins on a new line."""
    drawn = 0

    def draw(record: BatchRecord) -> None:
        nonlocal drawn
        room = shutil.get_terminal_size().columns - 1  # in the last column some terminals would wrap
        line = bar_line(record, room)
        text = "\r" + line.ljust(min(drawn, room))
        drawn = len(line)  # set before the line is drawn: a signal may come in between
        click.echo(text, nl=False)
        sys.stdout.flush()

    try:
        yield draw
    finally:
        if drawn:
            say()


@contextmanager
def changes(say: Callable[[BatchRecord], object]) -> Iterator[Show]:
    """Print a line whenever a count or the status has changed, and flush it for the reader of a pipe."""
    last: tuple[Any, ...] | None = None

    def look(record: BatchRecord) -> None:
        nonlocal last
        seen = (
            record.status, record.is_open, record.total, record.completed, record.failed, record.canceled,
            record.in_tsq, record.cancel is not None,
        )  # fmt: skip
        if seen != last:
            say(record)
            sys.stdout.flush()
            last = seen

    yield look


def bar_line(record: BatchRecord, room: int) -> str:
    """`[#######-----]  58%  5800/10000  312.5/s  ETA 13s  3 failed`, in so many columns at most."""
    text = fitted([f"{percent(record):>4}", *figures(record)], room)
    width = min(LONGEST_BAR, room - len(text) - len(GAP) - 2)
    if width >= SHORTEST_BAR:
        done = int(record.progress * width)
        text = f"[{'#' * done}{'-' * (width - done)}]{GAP}{text}"
    return text


def change_line(record: BatchRecord) -> str:
    """The same without a bar."""
    return GAP.join([record.status, percent(record), *figures(record)])


def percent(record: BatchRecord) -> str:
    """The share of members that are final; 100% only if all of them are."""
    return f"{int(record.progress * 100)}%"


def figures(record: BatchRecord) -> list[str]:
    """Counts, rate and ETA; zeros are left out."""
    parts = [f"{record.finished}/{record.total}"]
    if not record.is_finished:
        parts.append(f"{record.rate_per_second:.1f}/s")
        parts.append(f"ETA {eta(record)}")
    troubles = {"failed": record.failed, "canceled": record.canceled, "in the TSQ": record.in_tsq}
    parts += [f"{count} {what}" for what, count in troubles.items() if count]
    if record.is_open:
        parts.append("open")
    elif record.cancel is not None and not record.is_finished:
        parts.append("being canceled")
    return parts


def eta(record: BatchRecord) -> str:
    """How long the rest takes; `?` if that is unknown."""
    seconds = record.eta_seconds
    return "?" if seconds is None else age(max(1.0, round(seconds)))
