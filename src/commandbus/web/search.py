"""The search box: words that filter commands.

`type:ship status:failed domain:orders since:2h correlation:abc worker:w1 priority:high data.order_no=17` are
filters; so is `batch:ID` with its domain. Other words are an id, of a command, a batch, a process, a worker, or a
correlation; or they are a text in the error of an attempt. `error:text` searches for a text only.

A search in errors and payloads has to read them. Without `since:` it goes back seven days.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.query import CommandQuery
from commandbus.model.command import CommandStatus
from commandbus.model.durations import parse_seconds
from commandbus.model.priority import PRIORITIES

_NAMES: Final = {
    "type": "command_type",
    "status": "status",
    "domain": "domain",
    "correlation": "correlation_id",
    "worker": "worker",
    "priority": "priority",
    "batch": "batch_id",
    "error": "error",
}
STATUSES: Final = tuple(status.value for status in CommandStatus)
DAYS: Final = 7


@dataclass(frozen=True, slots=True)
class Search:
    """What somebody typed: filters, and perhaps an id or a text. `days`: how far back a search goes that reads
    errors or payloads, if no time was given."""

    query: CommandQuery
    id: str | None
    now: datetime
    days: int | None = None

    def for_text(self) -> Search:
        """The same with the text in errors instead of an id."""
        return _with_time(replace(self, query=replace(self.query, error=self.id)))


def read_search(text: str, *, now: datetime) -> Search:
    """Read the words. An error names the one that cannot be read."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    filters: dict[str, Any] = {}
    data: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        name, colon, value = word.partition(":")
        path, equals, wanted = word.partition("=")
        if equals and path.startswith("data.") and len(path) > len("data."):
            data[path[len("data.") :]] = wanted
        elif colon and name in _NAMES:
            filters[_NAMES[name]] = _value(name, value)
        elif colon and name == "since":
            filters["created_after"] = _since(value, now)
        else:
            rest.append(word)
    query = CommandQuery(**filters, data=data or None)
    return _with_time(Search(query, " ".join(rest) or None, now))


def _with_time(search: Search) -> Search:
    """A search that reads errors or payloads goes back so far, unless a time was given."""
    query = search.query
    if query.created_after is not None or (query.error is None and query.data is None):
        return search
    return replace(search, query=replace(query, created_after=search.now - timedelta(days=DAYS)), days=DAYS)


def _since(value: str, now: datetime) -> datetime:
    return now - timedelta(seconds=parse_seconds(value, name="since", error=InvalidCommandError))


def _value(name: str, value: str) -> str:
    if not value:
        raise InvalidCommandError(f"{name}: has no value; write {name}:VALUE without a space")
    if name == "priority" and value not in PRIORITIES:
        raise InvalidCommandError(f"priority:{value[:100]} is none of {', '.join(PRIORITIES)}")
    return _status(value) if name == "status" else value


def _status(value: str) -> str:
    found = [status for status in STATUSES if status.lower().startswith(value.lower().replace("-", "_"))]
    if value.lower() in ("tsq", "troubleshooting"):
        return CommandStatus.IN_TROUBLESHOOTING_QUEUE.value
    if len(found) != 1:
        raise InvalidCommandError(f"status:{value[:100]} is none of {', '.join(STATUSES).lower()}")
    return found[0]
