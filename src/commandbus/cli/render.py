"""What commands print: tables for people, JSON for programs.

A table is aligned text, fitted to the terminal (`cli/table.py`). All output goes through `printable`
(`model/safe_text.py`), so that an error text cannot control somebody's terminal. JSON has its own escapes for the
same characters, so that it stays the same value.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from commandbus.cli.table import GAP, Column, lay_out
from commandbus.model.durations import format_seconds
from commandbus.model.safe_text import escaped, escaped_json, escaped_lines


def print_json(value: Any, *, on_one_line: bool = False) -> None:
    """One JSON document."""
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    text = json.dumps(_plain(value), indent=None if on_one_line else 2, ensure_ascii=not is_utf8)
    click.echo(escaped_json(text))


def say(sentence: str = "", *, is_error: bool = False) -> None:
    """Print one line for people. It may contain text from anybody, so it is escaped."""
    click.echo(escaped(sentence), err=is_error)


def say_heading(text: str) -> None:
    """Print a heading."""
    say()
    say(text)


def print_table(heads: Sequence[Column], rows: Iterable[Sequence[object]], *, empty: str = "nothing") -> None:
    """Print a table; `empty` is printed if it has no rows."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        say(empty)
        return
    is_terminal = sys.stdout.isatty()
    lines, left_out = lay_out(heads, cells, shutil.get_terminal_size().columns if is_terminal else None)
    for line in lines:
        click.echo(line)
    if left_out:
        say(f"left out because the terminal is too narrow: {', '.join(left_out)} (--json has everything)")


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair per line; those that are None are left out."""
    shown = {name: printable(value) for name, value in fields.items() if value is not None}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        say(f"{name:<{width}}{GAP}{value}".rstrip())


def printable(value: object) -> str:
    """A value as one line of text that cannot control a terminal."""
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
    """A value in terms of JSON: records become objects, instants ISO 8601, durations seconds."""
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
