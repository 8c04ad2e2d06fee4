"""What is known about domains, workers, what was set aside, and a command's trail. Reads only, locks nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime
from typing import Any

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.commands.domains import all_domains, no_queue
from commandbus.flow.commands.records import queue_rows
from commandbus.flow.commands.unhandled_types import UnhandledType, unhandled_types
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.command import AuditEntry, AuditEvent
from commandbus.model.count import MOST_COUNTED, Count, capped, is_capped
from commandbus.model.json_values import Json
from commandbus.model.page import Page, cut, id_of
from commandbus.model.payload import loads_or_none
from commandbus.quick_dataclass import dataclass

WORKER_ALIVE_SECONDS = 15.0
_EVENTS: Mapping[str, AuditEvent] = {event.value: event for event in AuditEvent}


@dataclass(frozen=True, slots=True)
class DomainStatus:
    """The counts of one domain; `oldest_seconds` is the age of the oldest command that could run now.

    A count goes no further than 10,000. It is then a `Count`, shown as "10,000+", and `capped` has its name.
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
    capped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker in the registry.

    `state` is ACTIVE, PAUSED (by an operator: it claims nothing), DRAINING, STOPPING or STOPPED. `health` is
    `{"state": …, "reasons": […]}` as it last reported. `supervisor` is the supervisor that started it, if any.
    `types` are the command types that it has handlers for, as "orders/ship". `version` is the release of
    commandbus, `code_version` the version of its handlers' code: the setting, or a hash of the code.
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
    code_version: str | None = None


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
        domains = yield from all_domains()
    found = []
    for domain in domains:
        try:
            rows = yield Statement(
                sql.text("commands/domain_status", domain=domain),
                {"domain": domain, "alive": WORKER_ALIVE_SECONDS, "most": MOST_COUNTED + 1},
            )
        except pg.UndefinedTable:
            raise (yield from no_queue(domain)) from None
        found.append(_domain_status(domain, rows[0]))
    waiting = yield from unhandled_types([item.domain for item in found if item.parked], most=MOST_COUNTED)
    return [replace(item, unhandled=[kind for kind in waiting if kind.domain == item.domain]) for item in found]


def _domain_status(domain: str, row: Row) -> DomainStatus:
    """A row of commands/domain_status.sql. If it has not seen all that is due, or all that is not, what it counted
    there is the least number."""
    due, later, ready, high, low, held_due, held_later, delayed, parked, keyed, in_tsq, rejected, *rest = row
    oldest, rate, is_paused, paused_types = rest
    is_due_cut, is_later_cut = due > MOST_COUNTED, later > MOST_COUNTED
    counts = {
        "ready": _least(ready, is_due_cut),
        "delayed": _least(delayed, is_later_cut),
        "running": _least(held_due + held_later, is_due_cut or is_later_cut),
        "parked": capped(parked + keyed),
        "in_tsq": capped(in_tsq),
        "rejected": capped(rejected),
        "ready_high": _least(high, is_due_cut),
        "ready_low": _least(low, is_due_cut),
    }
    return DomainStatus(
        domain=domain, ready=counts["ready"], delayed=counts["delayed"], running=counts["running"],
        parked=counts["parked"], in_tsq=counts["in_tsq"], oldest_seconds=oldest, settled_per_second=rate,
        is_paused=is_paused, paused_types=paused_types, rejected=counts["rejected"],
        ready_high=counts["ready_high"], ready_low=counts["ready_low"],
        capped=[name for name, count in counts.items() if is_capped(count)],
    )  # fmt: skip


def _least(count: int, is_cut: bool) -> Count:  # noqa: FBT001 - the second of two
    return Count(min(count, MOST_COUNTED), is_capped=is_cut)


@operation(atomic=False)
def list_workers() -> Steps[list[WorkerInfo]]:
    """The registry, youngest first."""
    rows = yield Statement(
        b"SELECT id, host, pid, domains, concurrency, version, state, started_at, heartbeat_at, "
        b"extract(epoch FROM pg_catalog.now() - heartbeat_at)::float8, "
        b"state <> 'STOPPED' AND heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s), "
        b"running, settled, "
        b"supervisor, health::text, COALESCE(types, '{}'), code_version "
        b"FROM commandbus.worker ORDER BY started_at DESC",
        {"alive": WORKER_ALIVE_SECONDS},
    )
    return [WorkerInfo(*(*head, loads_or_none(health), types, code)) for *head, health, types, code in rows]


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


def _details(text: str | None) -> dict[str, Any]:
    found = loads_or_none(text) or {}
    return {key: value for key, value in found.items() if value is not None}
