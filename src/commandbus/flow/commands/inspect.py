"""What is known about commands, domains, workers and the troubleshooting queue. Reads only, locks nothing.

Only the queue row knows whether a command is IN_PROGRESS. So for a page of commands, each queue concerned is read
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypedDict

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import CommandBusError, InvalidCommandError, UnknownDomainError
from commandbus.flow.breakers.breaker import explain
from commandbus.flow.commands.unhandled_types import MOST_COUNTED, UnhandledType, note_of_now, unhandled_types
from commandbus.flow.limits.inspect import LineEstimate, lines_of
from commandbus.flow.operation import Row, Statement, Steps, no_schema, operation
from commandbus.model import names, payload
from commandbus.model.command import AuditEntry, AuditEvent, CancelRequest, CommandRecord, CommandStatus, TsqEntry
from commandbus.model.json_values import Json
from commandbus.model.page import MAX_ID, Page, cut, id_of

WORKER_ALIVE_SECONDS = 15.0
_LIMIT = 10  # of commands/queue_rows.sql
HANDLER = "handler"  # what a parked command waits for: a worker that has one for its type
_EVENTS: Mapping[str, AuditEvent] = {event.value: event for event in AuditEvent}
_ALL = {"of_batch": "", "order": "c.id DESC"}
# In the order of command_batch: by the id alone the planner would look for them along the key, over all commands.
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


@dataclass(frozen=True, slots=True)
class DomainStatus:
    """The counts of one domain; `oldest_seconds` is the age of the oldest command that could run now.

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
    """A reply, or the command of a batch's end, that could not be put into its queue, and why."""

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
        "domain", "command_type", "command_id", "correlation_id", "status", "created_after", "created_before",
        "not_ids", "before_id",
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
    return [WorkerInfo(*(*head, _loads(health), types)) for *head, health, types in rows]


@operation(atomic=False)
def list_tsq(
    *,
    domain: str | None,
    command_type: str | None,
    error_code: str | None,
    limit: int,
    cursor: str | None = None,
) -> Steps[Page[TsqEntry]]:
    """Commands that need a person, those that entered the queue first coming first."""
    rows = yield Statement(
        sql.text("commands/list_tsq"),
        _filters(domain, command_type, error_code)
        | {
            "limit": names.check_count(limit, "limit") + 1,
            "after_id": id_of(cursor) or 0,
        },
    )
    return cut([TsqEntry(*(*head, _loads(data))) for *head, data in rows], limit, lambda entry: entry.id)


@operation(atomic=False)
def count_tsq(
    *, domain: str | None, command_type: str | None, error_code: str | None
) -> Steps[dict[tuple[str, str], int]]:
    """How many need a person, by (domain, command_type)."""
    rows = yield Statement(sql.text("commands/count_tsq"), _filters(domain, command_type, error_code))
    return {(row[0], row[1]): row[2] for row in rows}


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
    """The ids of commands that somebody holds."""
    domains = [domain] if domain is not None else (yield from _all_domains())
    found: list[int] = []
    for name in domains:
        try:
            rows = yield Statement(sql.text("commands/held_commands", domain=name), {"domain": name})
        except pg.UndefinedTable:
            raise (yield from no_queue(name)) from None
        found += [id_ for (id_,) in rows]
    return found


def complete(rows: Sequence[Row]) -> Steps[list[CommandRecord]]:
    """Look up the queue's side of those that are not settled."""
    waiting: dict[str, list[int]] = {}
    for row in rows:
        if row[4] == "PENDING":
            waiting.setdefault(row[1], []).append(row[17])
    queued: dict[tuple[str, int], Row] = {}
    lines: dict[tuple[str, int], LineEstimate] = {}
    for domain, msg_ids in waiting.items():
        found = yield Statement(
            sql.text("commands/queue_rows", domain=domain), {"domain": domain, "msg_ids": msg_ids}
        )
        queued |= {(domain, row[0]): row for row in found}
        if limited := {row[0]: row[_LIMIT] for row in found if row[_LIMIT] is not None}:
            limit_state = yield from lines_of(domain, limited)
            lines |= {(domain, msg_id): line for msg_id, line in limit_state.items()}
    unhandled = yield from _unhandled(queued)
    keys = [(row[1], row[17]) for row in rows]
    return [
        _record(row, queued.get(key), lines.get(key), unhandled.get((row[1], row[3])))
        for row, key in zip(rows, keys, strict=True)
    ]


def _unhandled(queued: Mapping[tuple[str, int], Row]) -> Steps[dict[tuple[str, str], str | None]]:
    """Why commands wait for a handler now, by domain and type: workers that have one may have come meanwhile."""
    domains = sorted({domain for (domain, _), row in queued.items() if row[5] == HANDLER})
    if not domains:
        return {}
    found = yield from unhandled_types(domains, most=1)
    return {(item.domain, item.command_type): note_of_now(item) for item in found}


def _record(row: Row, queue_row: Row | None, line: LineEstimate | None, unhandled: str | None) -> CommandRecord:
    attempt, attempt_base = row[11], row[12]
    record = CommandRecord(
        id=row[0], domain=row[1], command_id=row[2], command_type=row[3], status=CommandStatus(row[4]),
        data=_loads(row[5]), result=_loads(row[6]), correlation_id=row[7], reply_to=row[8], headers=_loads(row[9]),
        max_attempts=row[10], attempts=attempt_base if attempt is None else attempt, created_at=row[13],
        started_at=row[14], finished_at=row[15], worker=row[16], error_type=row[18], error_code=row[19],
        error=row[20], timeout=row[21], batch_id=row[22],
        charged_attempts=_charged(row[4], attempt, attempt_base, row[23]),
        apart=None if CommandStatus(row[4]).is_final else row[24],
    )  # fmt: skip
    if queue_row is None:
        return record
    _, vt, read_ct, held_by, since, reason, cancel, progress, until, note, limit, *breaker = queue_row
    note = _explain(note, *breaker)
    if line is not None:
        until, note = line.until, line.note  # of now: it may have been parked for another reason
    if reason == HANDLER:
        note = unhandled or note
    return replace(
        record,
        status=CommandStatus.IN_PROGRESS if held_by else record.status,
        attempts=attempt_base + read_ct,
        charged_attempts=max(0, read_ct - row[23]),
        worker=held_by,
        started_at=datetime.fromisoformat(since) if held_by and since else record.started_at,
        visible_at=None if held_by or reason else vt,
        waiting_for=reason,
        waiting_until=until,
        waiting_note=note,
        waiting_limit=limit,
        waiting_ahead=None if line is None else line.ahead,
        waiting_estimated_seconds=None if line is None else line.seconds,
        progress=_loads(progress) if held_by else None,
        cancel_requested=_cancel_request(cancel) if held_by else None,
    )


def _charged(status: str, attempt: int | None, attempt_base: int, waived: int) -> int | None:
    """How many attempts of a command that is not in its queue were charged; None if a person has ended it."""
    if attempt is not None:
        return max(0, attempt - attempt_base - waived)
    return 0 if status == "PENDING" or not attempt_base else None


def _explain(note: str | None, state: str | None, is_forced: bool | None, reason: str | None) -> str | None:  # noqa: FBT001
    """Why it is parked: in its breaker's words of now, or those that were written down."""
    return note if state is None else explain(state, is_forced=bool(is_forced), reason=reason)


def _cancel_request(text: str | None) -> CancelRequest | None:
    if text is None:
        return None
    found = payload.loads(text)
    return CancelRequest(found["by"], found["reason"], datetime.fromisoformat(found["at"]))


def _with_current(trail: list[AuditEntry], current: list[AuditEntry]) -> list[AuditEntry]:
    """A running attempt comes last, but before what was asked of it, and what its handler told."""
    running = {entry.attempt for entry in current}
    later = [entry for entry in trail if entry.attempt in running and _is_after_start(entry.event)]
    return [entry for entry in trail if entry not in later] + current + later


def _is_after_start(event: AuditEvent | str) -> bool:
    return event is AuditEvent.OPERATOR_CANCEL or not isinstance(event, AuditEvent)


def _current(domain: str, command_id: str) -> Steps[list[AuditEntry]]:
    """What only the queue row knows: a running attempt."""
    rows = yield Statement(
        b"SELECT msg_id, attempt_base FROM commandbus.command "
        b"WHERE domain = %(domain)s AND command_id = %(command_id)s AND status OPERATOR(pg_catalog.=) 'PENDING'",
        {"domain": domain, "command_id": command_id},
    )
    if not rows:
        return []
    msg_id, attempt_base = rows[0]
    queued = yield Statement(
        sql.text("commands/queue_rows", domain=domain), {"domain": domain, "msg_ids": [msg_id]}
    )
    return [
        AuditEntry(AuditEvent.RECEIVED, datetime.fromisoformat(since), attempt_base + read_ct, held_by)
        for _, _, read_ct, held_by, since, *_ in queued
        if held_by and since
    ]


def _all_domains() -> Steps[list[str]]:
    rows = yield Statement(b"SELECT name FROM commandbus.domain ORDER BY name")
    return [row[0] for row in rows]


def no_queue(domain: str) -> Steps[CommandBusError]:
    """A queue is missing: is it the domain, or all of commandbus?"""
    try:
        rows = yield Statement(b"SELECT pg_catalog.to_regclass('commandbus.domain') IS NULL")
    except pg.InFailedSqlTransaction:  # a lent pool whose connections are not in autocommit mode
        return UnknownDomainError(domain)
    return no_schema() if rows[0][0] else UnknownDomainError(domain)


def _loads(text: str | None) -> Any:
    return None if text is None else payload.loads(text)


def _whole(preview: str | None) -> Any:
    """The document whose beginning this is, if it is all of it."""
    try:
        return _loads(preview)
    except (ValueError, RecursionError):
        return None


def _foreign(text: str | None) -> Any:
    """JSON of another client; what Python cannot parse (depth, digits) stays text."""
    try:
        return _loads(text)
    except (ValueError, RecursionError):
        return text


def _filters(domain: str | None, command_type: str | None, error_code: object = None) -> dict[str, Any]:
    """What commands and the troubleshooting queue are both filtered by, checked."""
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
    found = _loads(text) or {}
    return {key: value for key, value in found.items() if value is not None}
