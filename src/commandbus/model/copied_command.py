"""A command as text that sends another one like it: a line for the shell, or Python. All characters are visible
ASCII, whatever the command holds."""

from __future__ import annotations

import json
import re
from typing import Final

from commandbus.model.command import CommandRecord
from commandbus.model.durations import format_seconds

LONGEST: Final = 20_000
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def copies_of(record: CommandRecord) -> dict[str, str]:
    """The copies by what they are; none if they are longer than somebody would paste."""
    copies = {"As a line for the shell": as_cli(record), "As Python": as_python(record)}
    return copies if all(len(text) <= LONGEST for text in copies.values()) else {}


def as_cli(record: CommandRecord) -> str:
    """A line for bash. The new command gets an id of its own."""
    words = ["commandbus", "send", record.domain, record.command_type, json.dumps(record.data)]
    for name, value in _options(record).items():
        words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    return " ".join(_quoted(word) for word in words)


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


def _quoted(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    if word.isascii() and word.isprintable():
        return "'" + word.replace("'", "'\\''") + "'"
    return "$'" + "".join(_escaped(character) for character in word) + "'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isascii() and character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
