"""AuditLogger and AsyncAuditLogger: what happened to a command, including the application's own events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from commandbus.bus.one_body import awaited
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.flow.operation import then
from commandbus.lazy import lazy
from commandbus.model.command import AuditEntry
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page

if TYPE_CHECKING:
    from commandbus.flow.audit import list_actions as actions
    from commandbus.flow.audit.list_actions import ActionRecord
    from commandbus.flow.commands import audit_events, inspect
    from commandbus.flow.commands.audit_events import NewAuditEvent
else:
    actions = lazy("commandbus.flow.audit.list_actions")
    audit_events = lazy("commandbus.flow.commands.audit_events")
    inspect = lazy("commandbus.flow.commands.inspect")


class AuditLogger(Repository):
    """Audit trails: `bus.audit`, or `AuditLogger(pool)`."""

    def log(
        self,
        domain: str,
        command_id: str,
        event: str,
        details: Mapping[str, JsonValue] | None = None,
        *,
        conn: object = None,
    ) -> None:
        """Write an event of the application into a command's trail; with `conn` in the caller's transaction.

        Its name is any text except the names of commandbus' own events (`AuditEvent`).
        """
        new = audit_events.NewAuditEvent(command_id, event, details)
        logging = audit_events.log(domain, [new], max_bytes=self._bus.settings.max_payload_bytes)
        return self._bus.run(then(logging, lambda _: None), conn)

    def log_many(self, domain: str, events: Iterable[NewAuditEvent], *, conn: object = None) -> int:
        """Write events, all or none. Returns how many."""
        limit = self._bus.settings.max_payload_bytes
        return self._bus.run(audit_events.log(domain, events, max_bytes=limit), conn)

    def list_actions(
        self,
        *,
        operator: str | None = None,
        action: str | None = None,
        domain: str | None = None,
        since: datetime | None = None,
        before: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ActionRecord]:
        """A page of what people did to commands, limits, breakers, pauses and schedules, newest first.

        What commandbus did to limits and breakers by itself is among it (operator "commandbus"). If the page
        `is_partial`, continue with its cursor.
        """
        listing = actions.list_actions(
            operator=operator, action=action, domain=domain, since=since, before=before, limit=limit, cursor=cursor
        )
        return self._bus.run(listing, conn)

    def get_events(self, domain: str, command_id: str, *, conn: object = None) -> Page[AuditEntry]:
        """Every event of a command, in order; empty if there is no such command."""
        return self._bus.run(then(inspect.get_audit_trail(domain, command_id), Page), conn)


class AsyncAuditLogger(AsyncRepository):
    """Audit trails for async code: `bus.audit`, or `AsyncAuditLogger(pool)`. The same methods, awaited."""

    log = awaited(AuditLogger.log)
    log_many = awaited(AuditLogger.log_many)
    list_actions = awaited(AuditLogger.list_actions)
    get_events = awaited(AuditLogger.get_events)
