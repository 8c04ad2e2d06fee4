"""What is known about commands, domains, workers and the troubleshooting queue. Reads only, locks nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime
from typing import Any, TypedDict

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import CommandBusError, InvalidCommandError, UnknownDomainError
from commandbus.flow.commands.records import complete, queue_rows
from commandbus.flow.commands.unhandled_types import MOST_COUNTED, UnhandledType, unhandled_types
from commandbus.flow.operation import Statement, Steps, no_schema, operation
from commandbus.model import names
from commandbus.model import priority as priorities
from commandbus.model.command import AuditEntry, AuditEvent, CommandRecord, CommandStatus, TsqEntry
from commandbus.model.json_values import Json
from commandbus.model.page import MAX_ID, Page, cut, id_of
from commandbus.model.payload import loads_or_none
from commandbus.model.priority import Priority
from commandbus.quick_dataclass import dataclass

WORKER_ALIVE_SECONDS = 15.0
_EVENTS: Mapping[str, AuditEvent] = {event.value: event for event in AuditEvent}
_ALL = {"of_batch": "", "order": "c.id DESC"}
# In the order of command_batch. With an order by id alone, the planner would walk over all commands by their key.
_MEMBERS = {
    "of_batch": "AND c.batch >= %(batch)s AND (c.batch, c.id) < (%(batch)s, COALESCE(%(before_id)s, %(last)s))",
    "order": "c.batch DESC, c.id DESC",
}


@dataclass(frozen=True, slots=True)
class CommandQuery:
    """Filters of query_commands; those that are given must all hold. A `batch_id` needs its domain."""

    domain: str | None = None
    command_type: str | None = None
    status: CommandStatus | str | None = None
    command_id: str | None = None
    correlation_id: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    batch_id: str | None = None
    priority: Priority | None = None


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


@dataclass(frozen=True, slots=True)
class DomainStatus:
    """The counts of one domain; `oldest_seconds` is the age of the oldest command that could run now.

    `ready_high` and `ready_low` say how many of the `ready` ones have high or low priority.
    `unhandled` are the command types whose commands are parked until a worker with a handler for them starts.
    """

    domain: str
    ready: int
    delayed: int
    running: int
    parked: int
    in_tsq: int
    oldest_seconds: float | None
    settled_per_second: float
    is_paused: bool
    paused_types: list[str] = field(default_factory=list)
    rejected: int = 0
    ready_high: int = 0
    ready_low: int = 0
    unhandled: list[UnhandledType] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker in the registry.

    `state` is ACTIVE, DRAINING, EXITING or STOPPED. `health` is `{"state": …, "reasons": […]}` as it last
    reported. `supervisor` is the supervisor that started it, if any. `types` are the command types that it has
    handlers for, as "orders/ship".
    """

    id: str
    host: str
    pid: int
    domains: list[str]
    concurrency: int
    version: str
    state: str
    started_at: datetime
    heartbeat_at: datetime
    heartbeat_age_seconds: float
    is_alive: bool
    running: int
    settled: int
    supervisor: str | None = None
    health: Mapping[str, Json] | None = None
    types: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RejectedMessage:
    """A raw message that was not a command, and why it was set aside.

    `message` is the message if its text is short; `preview` is the beginning of its text. Both are None if it was
    set aside unread. The whole message is in `commandbus.rejected_message`.
    """

    id: int
    domain: str
    msg_id: int
    message: Json
    preview: str | None
    reason: str
    rejected_at: datetime


@dataclass(frozen=True, slots=True)
class UndeliveredReply:
    """A reply, or the `on_complete` command of a batch, that could not be put into its queue, and why."""

    id: int
    queue: str
    message: Json
    reason: str
    created_at: datetime


@operation(atomic=False)
def query_commands(query: CommandQuery, *, limit: int, cursor: str | None = None) -> Steps[Page[CommandRecord]]:
    """A page of commands that match."""
    names.check_count(limit, "limit")
    status = _status(query.status)
    params: dict[str, Any] = _filters(query.domain, query.command_type) | {
        "command_id": None if query.command_id is None else names.to_id(query.command_id),
        "correlation_id": None
        if query.correlation_id is None
        else names.to_id(query.correlation_id, "correlation_id"),
        "status": status,
        "priority": priorities.to_number(query.priority, InvalidCommandError),
        "created_after": _instant(query.created_after, "created_after"),
        "created_before": _instant(query.created_before, "created_before"),
        "batch": None,
        "last": MAX_ID,
        "ids": None,
        "not_ids": None,
        "before_id": id_of(cursor),
        "limit": limit + 1,
    }
    if query.batch_id is not None:
        params["batch"] = yield from _batch(query.domain, query.batch_id)
        if params["batch"] is None:
            return Page([])
    if status in (CommandStatus.PENDING, CommandStatus.IN_PROGRESS):
        held_now = yield from held(query.domain)
        running = status is CommandStatus.IN_PROGRESS
        params |= {"status": "PENDING", "ids" if running else "not_ids": held_now}
    parts = _ALL if params["batch"] is None else _MEMBERS
    rows = yield Statement(sql.text("commands/query_commands", **parts), params)
    items = yield from complete(rows[:limit])
    return Page(items, str(items[-1].id) if len(rows) > limit else None)


def records(ids: Sequence[int]) -> Steps[list[CommandRecord]]:
    """What is known of the commands with these internal ids, newest first."""
    unfiltered = (
        "domain", "command_type", "command_id", "correlation_id", "status", "priority", "created_after",
        "created_before", "not_ids", "before_id",
    )  # fmt: skip
    params = dict.fromkeys(unfiltered) | {"ids": list(ids), "limit": len(ids)}
    rows = yield Statement(sql.text("commands/query_commands", **_ALL), params)
    return (yield from complete(rows))


@operation(atomic=False)
def get_audit_trail(domain: str, command_id: str) -> Steps[list[AuditEntry]]:
    """Every event of a command in order; empty if there is no such command."""
    names.check_domain(domain)
    command_id = names.to_id(command_id)
    rows = yield Statement(
        b"SELECT event, at, attempt, worker, details FROM commandbus.audit_trail(%(domain)s, %(command_id)s)",
        {"domain": domain, "command_id": command_id},
    )
    trail = [
        AuditEntry(_EVENTS.get(event, event), at, attempt, worker, _details(details))
        for event, at, attempt, worker, details in rows
    ]
    if trail:
        trail = _with_current(trail, (yield from _current(domain, command_id)))
    return trail


@operation(atomic=False)
def domain_status(domains: Sequence[str] | None = None) -> Steps[list[DomainStatus]]:
    """The figures of these domains (None: all)."""
    if domains is None:
        domains = yield from _all_domains()
    found = []
    for domain in domains:
        try:
            rows = yield Statement(
                sql.text("commands/domain_status", domain=domain),
                {"domain": domain, "alive": WORKER_ALIVE_SECONDS},
            )
        except pg.UndefinedTable:
            raise (yield from no_queue(domain)) from None
        found.append(DomainStatus(domain, *rows[0]))
    waiting = yield from unhandled_types([item.domain for item in found if item.parked], most=MOST_COUNTED)
    return [replace(item, unhandled=[kind for kind in waiting if kind.domain == item.domain]) for item in found]


@operation(atomic=False)
def list_workers() -> Steps[list[WorkerInfo]]:
    """The registry, youngest first."""
    rows = yield Statement(
        b"SELECT id, host, pid, domains, concurrency, version, state, started_at, heartbeat_at, "
        b"extract(epoch FROM pg_catalog.now() - heartbeat_at)::float8, "
        b"state <> 'STOPPED' AND heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s), "
        b"running, settled, "
        b"supervisor, health::text, COALESCE(types, '{}') "
        b"FROM commandbus.worker ORDER BY started_at DESC",
        {"alive": WORKER_ALIVE_SECONDS},
    )
    return [WorkerInfo(*(*head, loads_or_none(health), types)) for *head, health, types in rows]


@operation(atomic=False)
def list_tsq(
    *,
    domain: str | None,
    command_type: str | None,
    error_code: str | None,
    limit: int,
    cursor: str | None = None,
) -> Steps[Page[TsqEntry]]:
    """Commands that need a person. Those that entered the troubleshooting queue first come first."""
    rows = yield Statement(
        sql.text("commands/list_tsq"),
        _filters(domain, command_type, error_code)
        | {
            "limit": names.check_count(limit, "limit") + 1,
            "after_id": id_of(cursor) or 0,
        },
    )
    return cut([TsqEntry(*(*head, loads_or_none(data))) for *head, data in rows], limit, lambda entry: entry.id)


@operation(atomic=False)
def count_tsq(
    *, domain: str | None, command_type: str | None, error_code: str | None
) -> Steps[dict[tuple[str, str], int]]:
    """How many need a person, by (domain, command_type)."""
    rows = yield Statement(sql.text("commands/count_tsq"), _filters(domain, command_type, error_code))
    return {(of_domain, of_type): count for of_domain, of_type, count in rows}


@operation(atomic=False)
def list_rejected(
    *, domain: str | None = None, limit: int, cursor: str | None = None
) -> Steps[Page[RejectedMessage]]:
    """Messages that were set aside, newest first."""
    params = {
        "domain": None if domain is None else names.check_domain(domain),
        "limit": names.check_count(limit, "limit") + 1,
        "before_id": id_of(cursor),
    }
    rows = yield Statement(sql.text("commands/list_rejected"), params)
    found = [
        RejectedMessage(id_, name, msg_id, _whole(preview), preview, reason, rejected_at)
        for id_, name, msg_id, preview, reason, rejected_at in rows
    ]
    return cut(found, limit, lambda item: item.id)


@operation(atomic=False)
def list_undelivered(*, limit: int, cursor: str | None = None) -> Steps[Page[UndeliveredReply]]:
    """Replies that could not be delivered, newest first."""
    params = {
        "limit": names.check_count(limit, "limit") + 1,
        "before_id": id_of(cursor),
    }
    rows = yield Statement(sql.text("commands/list_undelivered"), params)
    found = [
        UndeliveredReply(id_, queue, _foreign(message), reason, created_at)
        for id_, queue, message, reason, created_at in rows
    ]
    return cut(found, limit, lambda item: item.id)


def _batch(domain: str | None, batch_id: object) -> Steps[int | None]:
    if domain is None:
        raise InvalidCommandError(f"batch_id {names.shown(batch_id)} needs its domain: it is unique within one")
    rows = yield Statement(
        b"SELECT id FROM commandbus.batch WHERE domain = %(domain)s AND batch_id = %(batch_id)s",
        {"domain": domain, "batch_id": names.to_id(batch_id, "batch_id")},
    )
    return rows[0][0] if rows else None


def held(domain: str | None) -> Steps[list[int]]:
    """The ids of commands that a worker holds."""
    domains = [domain] if domain is not None else (yield from _all_domains())
    found: list[int] = []
    for name in domains:
        try:
            rows = yield Statement(sql.text("commands/held_commands", domain=name), {"domain": name})
        except pg.UndefinedTable:
            raise (yield from no_queue(name)) from None
        found += [id_ for (id_,) in rows]
    return found


def _with_current(trail: list[AuditEntry], current: list[AuditEntry]) -> list[AuditEntry]:
    """Put a running attempt last, but before requests to cancel it, and before what its handler has reported."""
    running = {entry.attempt for entry in current}
    later = [entry for entry in trail if entry.attempt in running and _is_after_start(entry.event)]
    return [entry for entry in trail if entry not in later] + current + later


def _is_after_start(event: AuditEvent | str) -> bool:
    return event in (AuditEvent.OPERATOR_CANCEL, AuditEvent.OPERATOR_PRIORITY) or not isinstance(event, AuditEvent)


def _current(domain: str, command_id: str) -> Steps[list[AuditEntry]]:
    """The event that only the queue row knows: a running attempt."""
    rows = yield Statement(
        b"SELECT msg_id, attempt_base FROM commandbus.command "
        b"WHERE domain = %(domain)s AND command_id = %(command_id)s AND status OPERATOR(pg_catalog.=) 'PENDING'",
        {"domain": domain, "command_id": command_id},
    )
    if not rows:
        return []
    msg_id, attempt_base = rows[0]
    queued = yield from queue_rows(domain, [msg_id])
    return [
        AuditEntry(AuditEvent.RECEIVED, datetime.fromisoformat(row.since), attempt_base + row.read_ct, row.held_by)
        for row in queued
        if row.held_by and row.since
    ]


def _all_domains() -> Steps[list[str]]:
    rows = yield Statement(b"SELECT name FROM commandbus.domain ORDER BY name")
    return [name for (name,) in rows]


def no_queue(domain: str) -> Steps[CommandBusError]:
    """A queue is missing. Find out whether the domain does not exist, or commandbus was never migrated."""
    try:
        rows = yield Statement(b"SELECT pg_catalog.to_regclass('commandbus.domain') IS NULL")
    except pg.InFailedSqlTransaction:  # a lent pool whose connections are not in autocommit mode
        return UnknownDomainError(domain)
    return no_schema() if rows[0][0] else UnknownDomainError(domain)


def _whole(preview: str | None) -> Any:
    """The document, if this beginning of its text is all of it; otherwise None."""
    try:
        return loads_or_none(preview)
    except (ValueError, RecursionError):
        return None


def _foreign(text: str | None) -> Any:
    """JSON of another client. A document that Python cannot parse (depth, digits) stays text."""
    try:
        return loads_or_none(text)
    except (ValueError, RecursionError):
        return text


def _filters(domain: str | None, command_type: str | None, error_code: object = None) -> dict[str, Any]:
    """The filters that commands and the troubleshooting queue have in common, checked."""
    return {
        "domain": None if domain is None else names.check_domain(domain),
        "command_type": None if command_type is None else names.check_type(command_type),
        "error_code": None if error_code is None else names.check_id(error_code, "error_code"),
    }


def _status(value: object) -> CommandStatus | None:
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


def _details(text: str | None) -> dict[str, Any]:
    found = loads_or_none(text) or {}
    return {key: value for key, value in found.items() if value is not None}
