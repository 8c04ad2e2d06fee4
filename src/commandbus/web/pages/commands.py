"""Commands: the search, and the page of one command."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from commandbus.bus import AsyncCommandBus
from commandbus.errors import CommandNotFoundError
from commandbus.flow.commands.query import CommandQuery
from commandbus.model.copied_command import as_cli, as_python
from commandbus.web.console import Console
from commandbus.web.ledger_chart import chart_of
from commandbus.web.pages.page_route import PageRoutes
from commandbus.web.rendering import query
from commandbus.web.search import STATUSES, read_search


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def commands(request: Request, search: str = "", cursor: str | None = None) -> Response:
        """A page of commands, newest first; or the page of what an id names."""
        wanted = read_search(search, now=datetime.now(UTC))
        if wanted.id is not None and (target := await _find(bus, wanted.id, wanted.query)) is not None:
            return RedirectResponse(f"{request.scope.get('root_path', '')}{target}", status_code=303)
        found = None
        if wanted.id is None:
            found = await bus.query_commands(wanted.query, cursor=cursor)
        return console.page(
            request, "commands.html", search=search, wanted=wanted, page=found, cursor=cursor, statuses=STATUSES
        )

    async def command(request: Request, domain: str, id: str) -> Response:  # noqa: A002 - the link's own
        """One command, its attempts and its trail."""
        record = await bus.get_command(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no command {id!r} in domain {domain!r}")
        ledger = await bus.get_ledger(domain, id)
        return console.page(
            request,
            "command.html",
            record=record,
            trail=(await bus.get_audit_trail(domain, id)).items,
            attempts=(await bus.get_attempts(domain, id)).items,
            process=await bus.processes.get_by_command(domain, id),
            effects=(await bus.commands.get_effects(domain, id)).items,
            checkpoint=await bus.commands.get_checkpoint(domain, id),
            waiting=await bus.why_waiting(domain, id),
            chart=None if ledger is None else chart_of(ledger),
            copies={"As a line for the shell": as_cli(record), "As Python": as_python(record)},
        )

    return {"/commands": commands, "/command": command}


async def _find(bus: AsyncCommandBus, id_: str, wanted: CommandQuery) -> str | None:
    """The page of what has this id; None if nothing has."""
    domains = [item.name for item in await bus.list_domains()]
    for domain in [wanted.domain] if wanted.domain else domains:
        if await bus.commands.exists(domain, id_):
            return f"/command{query({'domain': domain, 'id': id_})}"
        if await bus.batches.exists(domain, id_):
            return f"/batch{query({'domain': domain, 'id': id_})}"
        if await bus.processes.exists(domain, id_):
            return f"/process{query({'domain': domain, 'id': id_})}"
    return None
