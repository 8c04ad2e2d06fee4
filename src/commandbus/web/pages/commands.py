"""Commands: the search, and the page of one command."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from commandbus.errors import CommandNotFoundError
from commandbus.flow.commands.find_id import FoundId
from commandbus.flow.commands.query_filters import CommandQuery, check_query
from commandbus.flow.processes.inspect import VIEW
from commandbus.flow.processes.process_of_command import get_process_of
from commandbus.model.command import CommandStatus
from commandbus.model.copied_command import copies_of, has_hidden
from commandbus.model.count import added
from commandbus.troubleshooting import AsyncTroubleshootingQueue
from commandbus.web.console import Console
from commandbus.web.event_stream import EventStream
from commandbus.web.keep_looking import keep_looking
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
        named: list[FoundId] = []
        if wanted.id is not None and cursor is None:
            named = (await bus.find_id(wanted.id, domain=wanted.query.domain)).items
            own = [
                item for item in named if item.kind != "correlation"
            ] or named  # a process names its commands so
            if len(own) == 1:
                target = f"{request.scope.get('root_path', '')}{link_of(own[0])}"
                return RedirectResponse(target, status_code=303)
        if wanted.id is not None:
            wanted = wanted.for_text()
        found = None if named else await bus.query_commands(wanted.query, cursor=cursor)
        return console.page(
            request,
            "commands.html",
            search=search,
            wanted=wanted,
            page=found,
            named=[(item, link_of(item)) for item in named],
            cursor=cursor,
            statuses=STATUSES,
            tsq_search=tsq_search(wanted.query),
            in_tsq=0 if found is None or found.items else await in_tsq(wanted.query),
        )

    async def in_tsq(wanted: CommandQuery) -> int:
        """How many need a person, where nothing has failed: an attempt that fails for good leads there."""
        if wanted.status != CommandStatus.FAILED:
            return 0
        counts = await AsyncTroubleshootingQueue(bus).count_by_type(wanted.domain, wanted.command_type)
        return added(counts.values())

    async def events(request: Request, cursor: str, search: str = "") -> Response:
        """The rest of a search, for the page that is open."""
        wanted = read_search(search, now=datetime.now(UTC))
        query = (wanted if wanted.id is None else wanted.for_text()).query
        check_query(query, 1, cursor)
        return EventStream(keep_looking(console, query, cursor, str(request.scope.get("root_path", ""))))

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
            process=await bus.run(get_process_of(domain, id, bounds=VIEW)),
            effects=(await bus.commands.get_effects(domain, id)).items,
            checkpoint=await bus.commands.get_checkpoint(domain, id),
            waiting=await bus.why_waiting(domain, id),
            chart=None if ledger is None else chart_of(ledger),
            is_masked=bool(console.settings.mask) and has_hidden(record),
            copies=copies_of(record),
        )

    return {"/commands": commands, "/commands/events": events, "/command": command}


def tsq_search(wanted: CommandQuery) -> str:
    """The search for what needs a person, of the same domain and type."""
    words = ["status:tsq"]
    words += [f"domain:{wanted.domain}"] if wanted.domain else []
    words += [f"type:{shlex.quote(wanted.command_type)}"] if wanted.command_type else []
    return " ".join(words)


def link_of(found: FoundId) -> str:
    """The page of what has an id."""
    if found.kind == "worker":
        return f"/workers#{quote(found.id)}"
    if found.kind == "correlation":
        return f"/commands{query({'search': f'correlation:{shlex.quote(found.id)}'})}"
    return f"/{found.kind}{query({'domain': found.domain, 'id': found.id})}"
