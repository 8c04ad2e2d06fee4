"""AuditLogger and AsyncAuditLogger: what happened to a command, and what an application adds to that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.lazy import lazy
from commandbus.model.command import AuditEntry
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page

if TYPE_CHECKING:
    from commandbus.flow.commands import audit_events, inspect
    from commandbus.flow.commands.audit_events import NewAuditEvent
else:
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
        """Write an event of the application into a command's trail; with `conn` it is there if that commits.

        Its name is any text but those that commandbus itself tells (`AuditEvent`).
        """
        new = audit_events.NewAuditEvent(command_id, event, details)
        self._bus.run(audit_events.log(domain, [new], max_bytes=self._bus.settings.max_payload_bytes), conn)

    def log_many(self, domain: str, events: Iterable[NewAuditEvent], *, conn: object = None) -> int:
        """Write events, all or none; returns how many."""
        limit = self._bus.settings.max_payload_bytes
        return self._bus.run(audit_events.log(domain, events, max_bytes=limit), conn)

    def get_events(self, domain: str, command_id: str, *, conn: object = None) -> Page[AuditEntry]:
        """Every event of a command, in order; empty if there is no such command."""
        return Page(self._bus.run(inspect.get_audit_trail(domain, command_id), conn))


class AsyncAuditLogger(AsyncRepository):
    """Audit trails for async code: `bus.audit`, or `AsyncAuditLogger(pool)`. The same methods, awaited."""

    async def log(
        self,
        domain: str,
        command_id: str,
        event: str,
        details: Mapping[str, JsonValue] | None = None,
        *,
        conn: object = None,
    ) -> None:
        """Write an event of the application into a command's trail; with `conn` it is there if that commits.

        See AuditLogger.log.
        """
        new = audit_events.NewAuditEvent(command_id, event, details)
        await self._bus.run(audit_events.log(domain, [new], max_bytes=self._bus.settings.max_payload_bytes), conn)

    async def log_many(self, domain: str, events: Iterable[NewAuditEvent], *, conn: object = None) -> int:
        """Write events, all or none; returns how many."""
        limit = self._bus.settings.max_payload_bytes
        return await self._bus.run(audit_events.log(domain, events, max_bytes=limit), conn)

    async def get_events(self, domain: str, command_id: str, *, conn: object = None) -> Page[AuditEntry]:
        """Every event of a command, in order; empty if there is no such command."""
        return Page(await self._bus.run(inspect.get_audit_trail(domain, command_id), conn))
