"""What commands print: tables for people, JSON for programs.

A table is plain aligned text; on a terminal `rich` draws it, if it is installed. Whatever is printed goes through
`printable` (`model/safe_text.py`): an error text must not be able to write to somebody's terminal. JSON has its
own escapes for the same characters, so that it stays the same value.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from commandbus.model.durations import format_seconds
from commandbus.model.safe_text import escaped, escaped_json, escaped_lines

GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its head, and whether it holds numbers."""

    head: str
    is_number: bool = False


def columns(text: str) -> list[Column]:
    """Columns from their heads; those with a colon before them hold numbers: `"domain :ready :running"`."""
    return [Column(word.removeprefix(":").replace("_", " "), word.startswith(":")) for word in text.split()]


def print_json(value: Any, *, on_one_line: bool = False) -> None:
    """One JSON document."""
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    text = json.dumps(_plain(value), indent=None if on_one_line else 2, ensure_ascii=not is_utf8)
    click.echo(escaped_json(text))


def say(sentence: str = "", *, is_error: bool = False) -> None:
    """One line for people; what stands in it may be anybody's text."""
    click.echo(escaped(sentence), err=is_error)


def say_heading(text: str) -> None:
    """What follows is about this."""
    say()
    say(text)


def print_table(heads: Sequence[Column], rows: Iterable[Sequence[object]], *, empty: str = "nothing") -> None:
    """A table; `empty` is what is said when it would have no rows."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        say(empty)
    elif not (sys.stdout.isatty() and _print_with_rich(heads, cells)):
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in _aligned(heads, cells):
            click.echo(line if width is None else _clipped(line, width))


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values beneath each other; those that are None are left out."""
    shown = {name: printable(value) for name, value in fields.items() if value is not None}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        say(f"{name:<{width}}{GAP}{value}".rstrip())


def printable(value: object) -> str:
    """A value as one line of text that does nothing to a terminal."""
    match value:
        case None:
            text = ""
        case bool():
            text = "yes" if value else "no"
        case datetime():
            text = moment(value)
        case list() | tuple():
            text = ", ".join(map(str, value))
        case dict():
            text = compact(value)
        case _:
            text = str(value)
    return escaped(text)


def printable_lines(text: str) -> list[str]:
    """A text of several lines, each made printable."""
    return escaped_lines(text.removesuffix("\n")) if text else []


def compact(value: Any) -> str:
    """JSON on one line, for people."""
    return escaped_json(json.dumps(_plain(value), ensure_ascii=False))


def shortened(value: Any, longest: int = 100) -> str:
    """JSON on one line, for a table."""
    text = compact(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def moment(at: datetime) -> str:
    """An instant in the reader's own time zone, to the second."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float | None) -> str:
    """How long something took or has been waiting, roughly: `350ms`, `12.3s`, `4m10s`, `3h5m`, `12d4h`."""
    if seconds is None:
        return ""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return format_seconds(round(seconds, 3))
    if seconds < 60:
        return format_seconds(round(seconds, 1))
    if seconds < 3600:
        return format_seconds(round(seconds))
    return format_seconds(round(seconds / 60) * 60 if seconds < 86_400 else round(seconds / 3600) * 3600)


def age_of(at: datetime | None) -> str:
    """How long ago an instant was."""
    return "" if at is None else age((datetime.now(UTC) - at).total_seconds())


def _plain(value: Any) -> Any:
    """What JSON has words for: records become objects, instants ISO 8601, durations seconds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case set() | frozenset():
            return sorted(value)
        case datetime() | date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Path():
            return str(value)
    return value


def _aligned(heads: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    lines = [[column.head.upper() for column in heads], *rows]
    widths = [max(_width(line[index]) for line in lines) for index in range(len(heads))]
    for line in lines:
        padded = []
        for column, cell, width in zip(heads, line, widths, strict=True):
            space = " " * (width - _width(cell))
            padded.append(space + cell if column.is_number else cell + space)
        yield GAP.join(padded).rstrip()


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def _clipped(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(1, width - 1)] + "…"


def _print_with_rich(heads: Sequence[Column], rows: Sequence[Sequence[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="bold")
    for index, column in enumerate(heads):
        is_last = index == len(heads) - 1
        table.add_column(
            column.head.upper(), justify="right" if column.is_number else "left", no_wrap=not is_last,
            overflow="ellipsis" if is_last else "fold",
        )  # fmt: skip
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
    return True
