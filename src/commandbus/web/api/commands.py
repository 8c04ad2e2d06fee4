"""Commands, troubleshooting and stuck attempts, as JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from commandbus.errors import CommandNotFoundError
from commandbus.flow.commands.failures import FailureGroup
from commandbus.flow.commands.find_id import FoundId
from commandbus.flow.commands.history import AttemptRecord, StuckAttempt
from commandbus.flow.commands.inspect import RejectedMessage
from commandbus.flow.commands.stuck_groups import StuckGroup
from commandbus.flow.commands.why_waiting import WhyWaiting
from commandbus.model.command import AuditEntry, CommandRecord, CommandStatus, TsqEntry
from commandbus.model.ledger import Ledger
from commandbus.model.page import Page
from commandbus.web.api.parameters import Cursor, Domain, Id, Limit
from commandbus.web.console import Console
from commandbus.web.search import read_search


class CommandRow(BaseModel):
    """A command in a list: without data, result and headers, which may have a megabyte each. `/api/command` has
    them."""

    model_config = ConfigDict(from_attributes=True)

    domain: str
    command_id: str
    command_type: str
    status: CommandStatus
    priority: str
    correlation_id: str | None
    batch_id: str | None
    attempts: int
    max_attempts: int | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    waiting_for: str | None
    waiting_text: str | None
    error_type: str | None
    error_code: str | None
    error: str | None


class CommandOut(BaseModel):
    """One command with its history."""

    command: CommandRecord
    attempts: list[AttemptRecord]
    audit: list[AuditEntry]
    ledger: Ledger | None
    why_waiting: WhyWaiting | None


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/commands")
    async def commands(
        search: Annotated[str, Query(max_length=1000)] = "", limit: Limit = 50, cursor: Cursor = None
    ) -> Page[CommandRow]:
        """A page of commands, newest first. `search` is what the search box takes; words that are no filters are a
        text in an error. If the page is partial, continue with its cursor."""
        wanted = read_search(search, now=datetime.now(UTC))
        wanted = wanted if wanted.id is None else wanted.for_text()
        found = await bus.query_commands(wanted.query, limit=limit, cursor=cursor)
        return Page(
            [CommandRow.model_validate(item) for item in found],
            found.next_cursor,
            found.is_partial,
            found.reached_at,
        )

    @router.get("/find")
    async def find(id: Id, domain: Domain | None = None) -> list[FoundId]:  # noqa: A002 - the link's own name
        """What has this id: commands, batches, processes, workers, and commands with it as their correlation
        id."""
        return (await bus.find_id(id, domain=domain)).items

    @router.get("/command")
    async def command(domain: Domain, id: Id) -> CommandOut:  # noqa: A002 - the link's own name
        """One command with its history."""
        record = await bus.get_command(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no command {id!r} in domain {domain!r}")
        attempts, trail = await bus.get_attempts(domain, id), await bus.get_audit_trail(domain, id)
        ledger, waiting = await bus.get_ledger(domain, id), await bus.why_waiting(domain, id)
        return CommandOut(
            command=record, attempts=attempts.items, audit=trail.items, ledger=ledger, why_waiting=waiting
        )

    @router.get("/ledger")
    async def ledger(domain: Domain, id: Id) -> Ledger:  # noqa: A002 - the link's own name
        """Where the time of one command went: intervals from its sending to its end or to now."""
        found = await bus.get_ledger(domain, id)
        if found is None:
            raise CommandNotFoundError(f"no command {id!r} in domain {domain!r}")
        return found

    @router.get("/troubleshooting")
    async def troubleshooting(
        domain: Domain | None = None,
        command_type: Annotated[str | None, Query(max_length=200)] = None,
        error_code: Annotated[str | None, Query(max_length=200)] = None,
        fingerprint: Annotated[str | None, Query(max_length=200)] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Page[TsqEntry]:
        """Commands that need a person, the oldest first."""
        return await bus.commands.list_in_tsq(
            domain, command_type, error_code=error_code, fingerprint=fingerprint, limit=limit, cursor=cursor
        )

    @router.get("/failures")
    async def failures(
        domain: Domain | None = None,
        command_type: Annotated[str | None, Query(max_length=200)] = None,
        in_troubleshooting: Annotated[bool, Query(description="Only of commands that need a person.")] = False,
        limit: Limit = 50,
    ) -> Page[FailureGroup]:
        """Failures that are alike, counted together, the one that was seen last first."""
        return await bus.list_failures(domain, command_type, in_troubleshooting=in_troubleshooting, limit=limit)

    @router.get("/stuck")
    async def stuck(limit: Limit = 50, cursor: Cursor = None) -> Page[StuckAttempt]:
        """Attempts that had to be stopped, newest first."""
        return await bus.list_stuck(limit=limit, cursor=cursor)

    @router.get("/stuck/groups")
    async def stuck_groups(limit: Limit = 50) -> Page[StuckGroup]:
        """Where in the application's own code attempts hung, the place that was seen last first."""
        return await bus.list_stuck_groups(limit=limit)

    @router.get("/rejected")
    async def rejected(
        domain: Domain | None = None, limit: Limit = 50, cursor: Cursor = None
    ) -> Page[RejectedMessage]:
        """Messages that were no commands, newest first."""
        return await bus.rejected(domain, limit=limit, cursor=cursor)
