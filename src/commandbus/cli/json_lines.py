"""Reads a file of JSON lines, or standard input: one item per line. If a line is bad, the error names its number,
and nothing is done with any line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from commandbus.cli.parameters import parse_json
from commandbus.errors import CommandBusError, InvalidCommandError

T = TypeVar("T")
STDIN = "-"


def read_text(name: str) -> str:
    """A text file; `-` is the standard input."""
    if name == STDIN and sys.stdin is None:  # stdin is None after `<&-`
        raise click.UsageError("standard input is closed")
    try:
        content = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
        return content.decode()
    except OSError as error:
        raise click.UsageError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_items(name: str, make: Callable[[Any], T], *, undone: str) -> dict[int, T]:
    """Applies `make` to each line. Returns the results by line number. `undone` says what a bad line has
    prevented."""
    found = {}
    for number, line in enumerate(read_text(name).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found[number] = make(parse_json(line))
        except (ValueError, CommandBusError) as error:
            raise InvalidCommandError(f"{name}, line {number}: {error}; {undone}") from None
    return found


def check_unique(name: str, items: dict[int, T], field: str, *, undone: str) -> None:
    """If two items have the same id, the second one is a bad line."""
    seen: dict[str, int] = {}
    for number, item in items.items():
        own = getattr(item, field)
        if own is not None and seen.setdefault(own, number) != number:
            raise InvalidCommandError(
                f"{name}, line {number}: {field} {own!r} is also in line {seen[own]}; {undone}"
            )
