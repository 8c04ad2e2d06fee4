"""The search box: words that filter commands.

`type:ship status:failed domain:orders since:2h correlation:abc` are filters. A word alone is the id of a
command, a batch or a process.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.query import CommandQuery
from commandbus.model.command import CommandStatus
from commandbus.model.durations import parse_seconds

_NAMES: Final = {"type": "command_type", "status": "status", "domain": "domain", "correlation": "correlation_id"}
STATUSES: Final = tuple(status.value for status in CommandStatus)


@dataclass(frozen=True, slots=True)
class Search:
    """What somebody typed: filters, and perhaps an id."""

    query: CommandQuery
    id: str | None


def read_search(text: str, *, now: datetime) -> Search:
    """Read the words. An error names the one that cannot be read."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    filters: dict[str, object] = {}
    ids: list[str] = []
    for word in words:
        name, colon, value = word.partition(":")
        if colon and name in _NAMES:
            filters[_NAMES[name]] = _status(value) if name == "status" else value
        elif colon and name == "since":
            seconds = parse_seconds(value, name="since", error=InvalidCommandError)
            filters["created_after"] = now - timedelta(seconds=seconds)
        else:
            ids.append(word)
    if len(ids) > 1:
        raise InvalidCommandError(f"only one id can be searched at a time, not {len(ids)}: {', '.join(ids)[:200]}")
    return Search(CommandQuery(**filters), ids[0] if ids else None)  # type: ignore[arg-type]


def _status(value: str) -> str:
    found = [status for status in STATUSES if status.lower().startswith(value.lower().replace("-", "_"))]
    if value.lower() in ("tsq", "troubleshooting"):
        return CommandStatus.IN_TROUBLESHOOTING_QUEUE.value
    if len(found) != 1:
        raise InvalidCommandError(f"status:{value} is none of {', '.join(STATUSES).lower()}")
    return found[0]
