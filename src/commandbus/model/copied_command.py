"""A command as text that sends another one like it: a line for the shell, or Python. All characters are visible
ASCII, whatever the command holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

from commandbus.model.command import CommandRecord
from commandbus.model.durations import format_seconds
from commandbus.model.mask import HIDDEN
from commandbus.shell_words import arguments, quoted

LONGEST: Final = 20_000


def has_hidden(record: CommandRecord) -> bool:
    """Has a masking rule hidden something that a copy would send?"""
    return HIDDEN in _leaves([record.data, record.headers, *_options(record).values()])


def copies_of(record: CommandRecord) -> dict[str, str]:
    """The copies by what they are; none if they are longer than somebody would paste."""
    line = as_cli(record)
    copies = {} if line is None else {"As a line for the shell": line}
    copies["As Python"] = as_python(record)
    return copies if all(len(text) <= LONGEST for text in copies.values()) else {}


def as_cli(record: CommandRecord) -> str | None:
    """A line for bash. The new command gets an id of its own. None if the command line cannot give its headers."""
    headers = record.headers or {}
    if not all(isinstance(text, str) and name and "=" not in name for name, text in headers.items()):
        return None
    words = ["commandbus", "send"]
    for name, value in _options(record).items():
        words += [f"--{name.replace('_', '-')}", quoted(value)]
    for name, text in headers.items():
        words += ["--header", quoted(f"{name}={text}")]
    return " ".join([*words, arguments(record.domain, record.command_type, json.dumps(record.data))])


def as_python(record: CommandRecord) -> str:
    """A call of bus.send. The new command gets an id of its own."""
    given = [ascii(record.domain), ascii(record.command_type), ascii(record.data)]
    given += [f"{name}={value!a}" for name, value in _options(record).items()]
    if record.headers:
        given.append(f"headers={dict(record.headers)!a}")
    return f"bus.send({', '.join(given)})"


def _options(record: CommandRecord) -> dict[str, str | int]:
    found: dict[str, str | int | None] = {
        "correlation_id": record.correlation_id,
        "reply_to": None if record.reply_to == "!call" else record.reply_to,
        "max_attempts": record.max_attempts,
        "timeout": None if record.timeout is None else format_seconds(record.timeout),
        "on_exhausted": record.on_exhausted,
        "key": record.key if record.key_limit else None,
        "key_limit": record.key_limit,
        "priority": None if record.priority == "normal" else record.priority,
    }
    return {name: value for name, value in found.items() if value is not None}


def _leaves(value: object) -> Iterator[object]:
    """However deep it is nested: a stack of our own has no limit."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, Mapping):
            left += found.values()
        elif isinstance(found, list):
            left += found
        else:
            yield found
