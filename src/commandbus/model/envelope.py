"""The messages in a domain's queue: our own small ones, and those that any other PGMQ client may send.

Ours is `{"command": <id>}`; the command itself is a row of `commandbus.command`. A foreign client sends

    {"command_type": "…", "data": …, "command_id": "…", "correlation_id": "…", "reply_to": "…",
     "max_attempts": 5, "timeout": 30, "expires": 600, "on_exhausted": "fail", "priority": "high", "headers": {…}}

Only `command_type` is required. (`command_id` defaults to `pgmq-<queue>-<msg_id>`, so that a redelivery cannot
make two commands of one message.) Anything else is set aside with the reason that `read` gives.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from commandbus.errors import InvalidCommandError
from commandbus.model import names, payload, priority
from commandbus.model.command import NewCommand
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.retry import check_on_exhausted

MAX_NESTING = payload.MAX_NESTING + 1  # the message itself is a level
FIELDS = frozenset(
    {"command_type", "data", "command_id", "correlation_id", "reply_to", "max_attempts", "timeout", "expires",
     "on_exhausted", "priority", "headers"}
)  # fmt: skip


def read(message: Any, *, queue: str, msg_id: int, max_bytes: int = payload.DEFAULT_MAX_BYTES) -> NewCommand:
    """Returns the command in a raw message. Raises InvalidCommandError with the reason to set it aside."""
    if not isinstance(message, dict):
        raise InvalidCommandError(f"the message is {_kind(message)}, not an object with a command_type")
    if "command" in message and "command_type" not in message:
        raise InvalidCommandError(f"no command {names.shown(message['command'])} belongs to this message")
    if "command_type" not in message:
        raise InvalidCommandError("the message has no command_type")
    if unknown := sorted(message.keys() - FIELDS):
        raise InvalidCommandError(
            f"unknown field {names.shown(unknown[0])}; an envelope has the fields {', '.join(sorted(FIELDS))}"
        )
    if payload.is_nested_beyond(MAX_NESTING, message):
        raise InvalidCommandError(f"the message is nested more than {MAX_NESTING} levels deep")
    given = message.get("command_id")
    new = NewCommand(
        command_type=message["command_type"],
        data=message.get("data"),
        command_id=f"pgmq-{queue}-{msg_id}" if given is None else given,
        correlation_id=message.get("correlation_id"),
        reply_to=message.get("reply_to"),
        max_attempts=message.get("max_attempts"),
        headers=message.get("headers"),
        timeout=message.get("timeout"),
        expires=message.get("expires"),
        on_exhausted=message.get("on_exhausted"),
        priority=message.get("priority"),
    )
    check(new)
    payload.dump(new.data, what="data", max_bytes=max_bytes)
    payload.dump(new.headers, what="headers", max_bytes=max_bytes)
    return new


def check(new: NewCommand) -> None:
    """Check everything about a command except its payload. Raises InvalidCommandError that names the value."""
    names.check_type(new.command_type)
    if new.command_id is not None:
        names.check_id(new.command_id)
    if new.correlation_id is not None:
        names.check_id(new.correlation_id, "correlation_id")
    if new.reply_to is not None:
        names.check_queue(new.reply_to)
    if new.max_attempts is not None:
        _check_max_attempts(new.max_attempts)
    timeout_seconds(new.timeout)
    expiry(new.expires)
    if new.on_exhausted is not None:
        check_on_exhausted(new.on_exhausted, InvalidCommandError)
    priority.to_number(new.priority, InvalidCommandError)
    if new.headers is not None and not isinstance(new.headers, dict):
        raise InvalidCommandError(f"headers must be a dict, not {type(new.headers).__name__}")


def timeout_seconds(value: Duration | None) -> float | None:
    """Returns how long one attempt of a command may take, in seconds (0: no deadline)."""
    return None if value is None else parse_seconds(value, name="timeout", error=InvalidCommandError)


def expiry(value: Duration | datetime | None) -> float | str | None:
    """Returns how many seconds after its sending a command expires, or when, as ISO text."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return instant(value, name="expires")
    seconds = parse_seconds(value, name="expires", error=InvalidCommandError)
    if not seconds:
        raise InvalidCommandError("expires must be longer than 0: a command that has expired never starts")
    return seconds


def instant(value: object, *, name: str) -> str:
    """Returns a moment as ISO text."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidCommandError(
            f"{name} must be a datetime with a time zone (such as UTC), not {names.shown(value)}"
        )
    if not 1970 < value.year < 2500:  # beyond that begins the band of low priority (ADR 27)
        raise InvalidCommandError(f"{name} must be in the years 1971 to 2499, not {names.shown(value)}")
    return value.isoformat()


def _check_max_attempts(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise InvalidCommandError(
            f"max_attempts must be a whole number from 1 to 1000000, not {names.shown(value)}"
        )


def _kind(message: object) -> str:
    return {type(None): "null", list: "an array", str: "a string", bool: "a boolean"}.get(
        type(message), "a number"
    )
