"""The same as JSON, under /api. `/api/openapi.json` describes it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from pydantic import BaseModel, Field

from commandbus.bus import AsyncCommandBus
from commandbus.errors import CommandNotFoundError
from commandbus.flow.breakers.operate import BreakerInfo
from commandbus.flow.commands.history import AttemptRecord, StuckAttempt
from commandbus.flow.commands.inspect import DomainStatus, RejectedMessage, WorkerInfo
from commandbus.flow.commands.pause import PauseInfo
from commandbus.flow.limits.inspect import LimitInfo
from commandbus.flow.schedules.operate import ScheduleRecord
from commandbus.model.batch import BatchRecord
from commandbus.model.command import AuditEntry, CommandRecord, TsqEntry
from commandbus.model.page import Page
from commandbus.model.process import ProcessRecord
from commandbus.web.access import Visitor
from commandbus.web.actions import ACTIONS, LONGEST_FIELD
from commandbus.web.attention import concerns
from commandbus.web.console import Console
from commandbus.web.search import read_search

Limit = Annotated[int, Query(ge=1, le=200, description="How many at most.")]
Cursor = Annotated[str | None, Query(description="The next page: `next_cursor` of the last one.", max_length=200)]
Domain = Annotated[str, Query(max_length=100)]
Id = Annotated[str, Query(max_length=2000)]


class ConcernOut(BaseModel):
    """One thing that needs a person."""

    text: str
    link: str


class CommandOut(BaseModel):
    """One command with its history."""

    command: CommandRecord
    attempts: list[AttemptRecord]
    audit: list[AuditEntry]


class ActionIn(BaseModel):
    """The fields of an action. Which of them it needs, the list of actions says."""

    fields: dict[str, str] = Field(default_factory=dict, max_length=20)
    reason: str | None = Field(default=None, max_length=LONGEST_FIELD)


class Done(BaseModel):
    """What was done."""

    done: str


def api_routes(console: Console) -> APIRouter:
    """The routes of the API."""
    router = APIRouter(prefix="/api")
    _add_fleet(router, console)
    _add_commands(router, console.reading)
    _add_controls(router, console.reading)
    _add_groups(router, console.reading)
    _add_actions(router, console)
    return router


def _add_fleet(router: APIRouter, console: Console) -> None:
    bus = console.reading

    @router.get("/concerns")
    async def list_concerns() -> list[ConcernOut]:
        """What needs a person now."""
        return [ConcernOut(**asdict(item)) for item in concerns(await console.fleet())]

    @router.get("/domains")
    async def domains() -> list[DomainStatus]:
        """What waits and runs, per domain."""
        return (await bus.status()).items

    @router.get("/pauses")
    async def pauses() -> list[PauseInfo]:
        """What is paused."""
        return (await bus.pauses()).items

    @router.get("/workers")
    async def workers() -> list[WorkerInfo]:
        """All workers in the registry."""
        return (await bus.workers()).items


def _add_commands(router: APIRouter, bus: AsyncCommandBus) -> None:
    @router.get("/commands")
    async def commands(
        search: Annotated[str, Query(max_length=1000)] = "", limit: Limit = 50, cursor: Cursor = None
    ) -> Page[CommandRecord]:
        """A page of commands, newest first. `search` is what the search box takes, without an id alone."""
        wanted = read_search(search, now=datetime.now(UTC)).query
        return await bus.query_commands(wanted, limit=limit, cursor=cursor)

    @router.get("/command")
    async def command(domain: Domain, id: Id) -> CommandOut:  # noqa: A002 - the link's own name
        """One command with its history."""
        record = await bus.get_command(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no command {id!r} in domain {domain!r}")
        attempts, trail = await bus.get_attempts(domain, id), await bus.get_audit_trail(domain, id)
        return CommandOut(command=record, attempts=attempts.items, audit=trail.items)

    @router.get("/troubleshooting")
    async def troubleshooting(
        domain: Domain | None = None,
        command_type: Annotated[str | None, Query(max_length=200)] = None,
        error_code: Annotated[str | None, Query(max_length=200)] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Page[TsqEntry]:
        """Commands that need a person, the oldest first."""
        return await bus.commands.list_in_tsq(
            domain, command_type, error_code=error_code, limit=limit, cursor=cursor
        )

    @router.get("/stuck")
    async def stuck(limit: Limit = 50, cursor: Cursor = None) -> Page[StuckAttempt]:
        """Attempts that had to be stopped, newest first."""
        return await bus.list_stuck(limit=limit, cursor=cursor)

    @router.get("/rejected")
    async def rejected(
        domain: Domain | None = None, limit: Limit = 50, cursor: Cursor = None
    ) -> Page[RejectedMessage]:
        """Messages that were no commands, newest first."""
        return await bus.rejected(domain, limit=limit, cursor=cursor)


def _add_controls(router: APIRouter, bus: AsyncCommandBus) -> None:
    @router.get("/limits")
    async def limits() -> list[LimitInfo]:
        """All limits."""
        return (await bus.limits()).items

    @router.get("/breakers")
    async def breakers() -> list[BreakerInfo]:
        """Breakers of command types and limits."""
        return (await bus.breakers()).items

    @router.get("/schedules")
    async def schedules() -> list[ScheduleRecord]:
        """All schedules."""
        return (await bus.schedules.list()).items


def _add_groups(router: APIRouter, bus: AsyncCommandBus) -> None:
    @router.get("/batches")
    async def batches(limit: Limit = 50, cursor: Cursor = None) -> Page[BatchRecord]:
        """Batches, newest first."""
        return await bus.query_batches(limit=limit, cursor=cursor)

    @router.get("/batch")
    async def batch(domain: Domain, id: Id) -> BatchRecord:  # noqa: A002
        """One batch."""
        record = await bus.get_batch(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no batch {id!r} in domain {domain!r}")
        return record

    @router.get("/processes")
    async def processes(limit: Limit = 50, cursor: Cursor = None) -> Page[ProcessRecord]:
        """Processes, newest first."""
        return await bus.query_processes(limit=limit, cursor=cursor)

    @router.get("/process")
    async def process(domain: Domain, id: Id) -> ProcessRecord:  # noqa: A002
        """One process with its steps."""
        record = await bus.get_process(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no process {id!r} in domain {domain!r}")
        return record


def _add_actions(router: APIRouter, console: Console) -> None:
    @router.get("/actions")
    async def actions() -> dict[str, list[str]]:
        """Every action, and its fields. A field that ends with `?` may be left out."""
        return {name: list(action.fields) for name, action in ACTIONS.items()}

    @router.post("/actions/{name}")
    async def act(request: Request, name: str, given: ActionIn) -> Done:
        """Do something, as an operator. The audit trail names the visitor."""
        visitor: Visitor = request.state.visitor
        if not visitor.may_act or not console.access.is_ours(request, visitor, request.headers.get("x-mark", "")):
            raise HTTPException(403, "only an operator may do this, with a token or from a page of the console")
        if name not in ACTIONS:
            raise CommandNotFoundError(f"there is no action {name!r}")
        fields = ACTIONS[name].check({**given.fields, "reason": given.reason or ""})
        return Done(done=await ACTIONS[name].run(console.acting, visitor.name, fields))
