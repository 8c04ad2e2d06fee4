"""query_commands: a page of the commands that match some filters, newest first. Reads only, locks nothing.

No call reads a table with ten million commands. Each takes one of these ways:

- by an index that fits: a command_id, the members of a batch, a correlation_id
- by a small table that has all that can match: the troubleshooting queue, the queue, attempts that ended a command
- along the key, backwards, over at most BUDGET commands. If that does not fill the page, the page is partial: its
  cursor says where to go on

A time (`created_after`, `created_before`) is first translated into a range of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.query_filters import CommandFilters as CommandFilters
from commandbus.flow.commands.query_filters import CommandQuery as CommandQuery
from commandbus.flow.commands.query_filters import Wanted, Way, check_query, check_status, text_of
from commandbus.flow.commands.query_sources import BITE, Source, few_of_domain, held, listed, source_of
from commandbus.flow.commands.records import complete
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.command import CommandRecord, CommandStatus
from commandbus.model.page import Page, id_of

_BY_KEY = Way("c.id < %(before_id)s::bigint AND c.id >= %(after_id)s::bigint", "c.id DESC")
_BY_IDS = Way("c.id = ANY (%(ids)s::bigint[])", "c.id DESC")
_BY_NAME = Way("c.domain = %(domain)s AND c.command_id = %(command_id)s", "c.command_id")
_BY_BATCH = Way(
    "(c.batch, c.id) < (%(batch)s::bigint, %(before_id)s::bigint) "
    "AND (c.batch, c.id) >= (%(batch)s::bigint, %(after_id)s::bigint) AND c.batch >= %(batch)s::bigint",
    "c.batch DESC, c.id DESC",
)
_BY_CORRELATION = Way(
    "(c.correlation_id, c.id) < (%(correlation_id)s, %(before_id)s::bigint) "
    "AND (c.correlation_id, c.id) >= (%(correlation_id)s, %(after_id)s::bigint) "
    "AND c.correlation_id >= %(correlation_id)s",
    "c.correlation_id DESC, c.id DESC",
)


@operation(atomic=False)
def query_commands(query: CommandQuery, *, limit: int, cursor: str | None = None) -> Steps[Page[CommandRecord]]:
    """A page of commands that match. A partial one says how far back it has looked."""
    page = yield from _look(query, limit, cursor)
    if not page.is_partial:
        return page
    rows = yield Statement(
        b"SELECT created_at FROM commandbus.command WHERE id >= %(id)s::bigint ORDER BY id LIMIT 1",
        {"id": id_of(page.next_cursor)},
    )
    return replace(page, reached_at=rows[0][0] if rows else None)


def _look(query: CommandQuery, limit: int, cursor: str | None) -> Steps[Page[CommandRecord]]:
    wanted, status = check_query(query, limit, cursor), check_status(query.status)
    if query.command_id is not None and query.domain is not None:
        return (yield from _direct(_BY_NAME, wanted.without("domain", "command_id")))
    if query.created_after is not None or query.created_before is not None:
        wanted = yield from _at_that_time(wanted)
    if query.batch_id is not None:
        batch = yield from _batch(query.domain, query.batch_id)
        if batch is None:
            return Page([])
        wanted = wanted.among(batch=batch)
        return (yield from _with_status(_BY_BATCH, wanted.without("domain"), status))
    if query.correlation_id is not None:
        return (yield from _with_status(_BY_CORRELATION, wanted.without("correlation_id"), status))
    source = yield from source_of(query, wanted.params, status)
    if source is not None:
        return (yield from _follow(source, wanted))
    return (yield from _with_status(_BY_KEY, wanted, status))


def records(ids: Sequence[int]) -> Steps[list[CommandRecord]]:
    """What is known of the commands with these internal ids, newest first."""
    rows = yield Statement(text_of(_BY_IDS, ()), {"ids": list(ids), "limit": len(ids)})
    return (yield from complete(rows))


def _direct(way: Way, wanted: Wanted) -> Steps[Page[CommandRecord]]:
    """By an index that finds only what matches."""
    rows = yield Statement(text_of(way, wanted.filters), wanted.params)
    items = yield from complete(rows[: wanted.limit])
    return Page(items, str(items[-1].id) if len(rows) > wanted.limit else None)


def _with_status(way: Way, wanted: Wanted, status: CommandStatus | None) -> Steps[Page[CommandRecord]]:
    """A walk. Whether a command runs is known to its queue only, not to the rows that are walked over."""
    if status in (CommandStatus.PENDING, CommandStatus.IN_PROGRESS):
        held_now = yield from held(wanted.params["domain"])
        wanted = wanted.among(status="PENDING", not_ids=held_now)
        if status is CommandStatus.IN_PROGRESS:
            return (yield from _follow(listed(held_now), wanted, way))
        wanted = wanted._replace(filters=(*wanted.filters, "not_ids"))
    return (yield from _walk(way, wanted))


def _walk(way: Way, wanted: Wanted) -> Steps[Page[CommandRecord]]:
    """Along an index, over at most `budget` commands."""
    end: int | None = None
    if wanted.filters:
        found = yield Statement(
            sql.text("commands/walk_end", range=way.range, order=way.order),
            wanted.params | {"budget": wanted.budget},
        )
        end = found[0][0] if found else None
    if end is None:
        return (yield from _direct(way, wanted))
    rows = yield Statement(text_of(way, wanted.filters), wanted.params | {"after_id": end})
    if len(rows) <= wanted.limit and way is _BY_KEY and wanted.params["domain"] is not None:
        ids = yield from few_of_domain(wanted.params["domain"])
        if ids is not None:
            return (yield from _follow(listed(ids), wanted))
    items = yield from complete(rows[: wanted.limit])
    is_full = len(rows) > wanted.limit
    return Page(items, str(items[-1].id if is_full else end), is_partial=not is_full)


def _follow(source: Source, wanted: Wanted, way: Way = _BY_KEY) -> Steps[Page[CommandRecord]]:
    """By a small table that has all that can match: its rows in bites, and of each bite those that match."""
    found: list[Row] = []
    before, looked_at, bite, is_end = wanted.params["before_id"], 0, wanted.limit + 1, False
    text = text_of(_in(way), wanted.filters)
    while not is_end and len(found) <= wanted.limit and looked_at < wanted.budget:
        ids, before, is_end = yield from source(before, bite)
        room = wanted.limit + 1 - len(found)
        if ids:
            found += yield Statement(text, wanted.params | {"ids": ids, "limit": room})
        looked_at += bite
        bite = BITE
        is_end = is_end or before <= wanted.params["after_id"]
    items = yield from complete(found[: wanted.limit])
    if len(found) > wanted.limit:
        return Page(items, str(items[-1].id))
    return Page(items) if is_end else Page(items, str(before), is_partial=True)


def _in(way: Way) -> Way:
    """Commands with these ids, and of this batch or correlation."""
    if way is _BY_KEY:
        return _BY_IDS
    own = "c.batch = %(batch)s" if way is _BY_BATCH else "c.correlation_id = %(correlation_id)s"
    return Way(f"{_BY_IDS.range} AND {own}", _BY_IDS.order)


def _at_that_time(wanted: Wanted) -> Steps[Wanted]:
    """The same, with the range of ids in which the commands of that time are."""
    params = wanted.params
    ((lowest, highest),) = yield Statement(
        sql.text("commands/ids_at"), {"after": params["created_after"], "before": params["created_before"]}
    )
    return wanted.among(
        before_id=min(params["before_id"], highest)
        if params["created_before"] is not None
        else params["before_id"],
        after_id=max(lowest, 0) if params["created_after"] is not None else 0,
    )


def _batch(domain: str | None, batch_id: object) -> Steps[int | None]:
    if domain is None:
        raise InvalidCommandError(f"batch_id {names.shown(batch_id)} needs its domain: it is unique within one")
    rows = yield Statement(
        b"SELECT id FROM commandbus.batch WHERE domain = %(domain)s AND batch_id = %(batch_id)s",
        {"domain": domain, "batch_id": names.to_id(batch_id, "batch_id")},
    )
    return rows[0][0] if rows else None
