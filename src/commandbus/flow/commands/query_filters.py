"""What query_commands is asked: the filters, checked, and the text of the statement that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypedDict

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.model import names
from commandbus.model import priority as priorities
from commandbus.model.command import CommandStatus
from commandbus.model.page import MAX_ID, id_of
from commandbus.model.priority import Priority
from commandbus.quick_dataclass import dataclass

BUDGET: Final = 20_000  # commands that one call looks at
BUDGET_FOR_DATA: Final = 5_000  # … if it must read what they carry
MOST_PATHS: Final = 10

_FILTERS: Final = {
    "domain": "   AND c.domain = %(domain)s\n",
    "command_id": "   AND c.command_id = %(command_id)s\n",
    "command_type": "   AND c.command_type = %(command_type)s\n",
    "correlation_id": "   AND c.correlation_id = %(correlation_id)s\n",
    "status": "   AND c.status::text = %(status)s\n",
    "priority": "   AND COALESCE(c.priority, 0::smallint) = %(priority)s::smallint\n",
    "worker": "   AND c.worker = %(worker)s\n",
    "created_after": "   AND c.created_at >= %(created_after)s\n",
    "created_before": "   AND c.created_at < %(created_before)s\n",
    "not_ids": "   AND c.id <> ALL (%(not_ids)s::bigint[])\n",
}
# PostgreSQL cannot read NUL and lone surrogates out of JSON, and raises an error. Nobody can search for such text.
_AT_PATH: Final = (
    "   AND CASE WHEN c.data::text !~ '\\\\u(0000|[dD][89a-fA-F])' "
    "THEN c.data OPERATOR(pg_catalog.#>>) %(path_{n})s::text[] END = %(value_{n})s\n"
)


class Way(NamedTuple):
    """A condition and an order that suit one index. Rows are compared as wholes, because only that index offers
    such a comparison: so no estimate can mislead the planner."""

    range: str
    order: str


@dataclass(frozen=True, slots=True)
class CommandQuery:
    """Filters of query_commands; those that are given must all hold. A `batch_id` needs its domain.

    `error` is a text that the error of an attempt contains, in any case. `data` says what the payload has at some
    paths: `{"order_no": "17", "customer.city": "Bern"}`, where a number or a truth value is written as JSON writes
    it. `worker` is the worker that settled the command.
    """

    domain: str | None = None
    command_type: str | None = None
    status: CommandStatus | str | None = None
    command_id: str | None = None
    correlation_id: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    batch_id: str | None = None
    priority: Priority | None = None
    worker: str | None = None
    error: str | None = None
    data: Mapping[str, str] | None = None


class CommandFilters(TypedDict, total=False):
    """The same filters, each by its name."""

    domain: str | None
    command_type: str | None
    status: CommandStatus | str | None
    command_id: str | None
    correlation_id: str | None
    created_after: datetime | None
    created_before: datetime | None
    batch_id: str | None
    priority: Priority | None
    worker: str | None
    error: str | None
    data: Mapping[str, str] | None


class Wanted(NamedTuple):
    """A query that was checked: its values by name, the texts of its filters, and its page."""

    params: dict[str, Any]
    filters: tuple[str, ...]
    limit: int
    budget: int

    def among(self, **more: Any) -> Wanted:
        """The same with other values."""
        return self._replace(params=self.params | more)

    def without(self, *filters: str) -> Wanted:
        """The same without filters that the way already has."""
        return self._replace(filters=tuple(name for name in self.filters if name not in filters))


def check_query(query: CommandQuery, limit: int, cursor: str | None) -> Wanted:
    names.check_count(limit, "limit")
    status = check_status(query.status)
    params: dict[str, Any] = {
        "domain": None if query.domain is None else names.check_domain(query.domain),
        "command_type": None if query.command_type is None else names.check_type(query.command_type),
        "command_id": _id(query.command_id, "command_id"),
        "correlation_id": _id(query.correlation_id, "correlation_id"),
        "status": None if status is None else status.value,
        "priority": priorities.to_number(query.priority, InvalidCommandError),
        "worker": _id(query.worker, "worker"),
        "created_after": _instant(query.created_after, "created_after"),
        "created_before": _instant(query.created_before, "created_before"),
        "error": None if query.error is None else _id(query.error, "error").lower(),
    }
    filters = [name for name, value in params.items() if value is not None and name != "error"]
    paths = _paths(query.data)
    for n, (path, value) in enumerate(paths):
        params |= {f"path_{n}": path, f"value_{n}": value}
        filters.append(f"path_{n}")
    page = {"before_id": id_of(cursor) or MAX_ID, "after_id": 0, "limit": limit + 1}
    return Wanted(params | page, tuple(filters), limit, BUDGET_FOR_DATA if paths or query.error else BUDGET)


def _paths(data: Mapping[str, str] | None) -> list[tuple[list[str], str]]:
    if data is None:
        return []
    if not isinstance(data, Mapping) or len(data) > MOST_PATHS:
        raise InvalidCommandError(
            f"data must be at most {MOST_PATHS} paths with their values, such as {{'order_no': '17'}}, "
            f"not {names.shown(data)}"
        )
    for path, value in data.items():
        if not isinstance(path, str) or not path or not isinstance(value, str):
            raise InvalidCommandError(
                f"data[{names.shown(path)}] is {names.shown(value)}: give a path and a text, such as "
                f"{{'order_no': '17'}}"
            )
    return [(_id(path, "data").split("."), _id(value, "data")) for path, value in data.items() if value or path]


def _id(value: object, what: str) -> Any:
    return None if value is None else names.to_id(value, what)


def text_of(way: Way, filters: Sequence[str]) -> bytes:
    chosen = "".join(
        _AT_PATH.replace("{n}", name[5:]) if name.startswith("path_") else _FILTERS[name] for name in filters
    )
    return sql.text("commands/query_commands", range=way.range, filters=chosen, order=way.order)


def check_status(value: object) -> CommandStatus | None:
    if value is None or isinstance(value, CommandStatus):
        return value
    try:
        return CommandStatus(value)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidCommandError(f"status {names.shown(value)} is none of {', '.join(CommandStatus)}") from None


def _instant(value: object, what: str) -> datetime | None:
    if value is None or (isinstance(value, datetime) and value.tzinfo is not None):
        return value
    raise InvalidCommandError(f"{what} must be a datetime with a time zone, not {names.shown(value)}")
