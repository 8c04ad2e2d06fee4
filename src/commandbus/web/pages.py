"""The pages: each reads with the reading bus, and shows what it found. Nothing here changes anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from commandbus.errors import CommandNotFoundError
from commandbus.flow.commands.inspect import CommandQuery
from commandbus.troubleshooting import AsyncTroubleshootingQueue
from commandbus.web.attention import Fleet, concerns, headline
from commandbus.web.console import Console
from commandbus.web.live import TooManyWatchersError
from commandbus.web.rendering import environment, query
from commandbus.web.search import STATUSES, read_search


def page_routes(console: Console) -> APIRouter:
    """The routes of all pages."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    pages = Pages(console)
    routes: dict[str, Callable[..., Awaitable[Response]]] = {
        "/": pages.now,
        "/now/events": pages.events,
        "/domains": pages.domains,
        "/commands": pages.commands,
        "/command": pages.command,
        "/troubleshooting": pages.troubleshooting,
        "/stuck": pages.stuck,
        "/limits": pages.limits,
        "/schedules": pages.schedules,
        "/batches": pages.batches,
        "/batch": pages.batch,
        "/processes": pages.processes,
        "/process": pages.process,
        "/workers": pages.workers,
        "/rejected": pages.rejected,
    }
    for path, page in routes.items():
        router.add_api_route(path, page, methods=["GET"])
    return router


class Pages:
    """The pages of one console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bus = console.reading

    async def now(self, request: Request) -> Response:
        """What needs a person, and the state of every domain."""
        return self._page(request, "now.html", **_now(await self._console.fleet()))

    async def events(self, request: Request) -> Response:
        """The same, again and again, for the page that is open."""
        root = str(request.scope.get("root_path", ""))
        template = environment().get_template("now_live.html")

        async def stream() -> AsyncIterator[str]:
            try:
                async for found in self._console.watched.values():
                    if isinstance(found, Exception):
                        yield "event: trouble\ndata: the database does not answer\n\n"
                    else:
                        text = template.render(root=root, **_now(found))
                        yield "".join(f"data: {line}\n" for line in text.splitlines()) + "\n"
            except TooManyWatchersError:
                yield "event: trouble\ndata: too many pages are open\n\n"
            except asyncio.CancelledError:
                return  # the page was closed

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def domains(self, request: Request) -> Response:
        """What waits and runs, per domain, and what is paused."""
        status, pauses = await self._bus.status(), await self._bus.pauses()
        return self._page(request, "domains.html", domains=status.items, pauses=pauses.items)

    async def commands(self, request: Request, search: str = "", cursor: str | None = None) -> Response:
        """A page of commands, newest first; or the page of what an id names."""
        wanted = read_search(search, now=datetime.now(UTC))
        if wanted.id is not None and (target := await self._find(wanted.id, wanted.query)) is not None:
            return RedirectResponse(f"{request.scope.get('root_path', '')}{target}", status_code=303)
        found = None
        if wanted.id is None:
            found = await self._bus.query_commands(wanted.query, cursor=cursor)
        return self._page(
            request, "commands.html", search=search, wanted=wanted, page=found, cursor=cursor, statuses=STATUSES
        )

    async def _find(self, id_: str, wanted: CommandQuery) -> str | None:
        """The page of what has this id; None if nothing has."""
        domains = [item.name for item in await self._bus.list_domains()]
        for domain in [wanted.domain] if wanted.domain else domains:
            if await self._bus.commands.exists(domain, id_):
                return f"/command{query({'domain': domain, 'id': id_})}"
            if await self._bus.batches.exists(domain, id_):
                return f"/batch{query({'domain': domain, 'id': id_})}"
            if await self._bus.processes.exists(domain, id_):
                return f"/process{query({'domain': domain, 'id': id_})}"
        return None

    async def command(self, request: Request, domain: str, id: str) -> Response:  # noqa: A002 - the link's own
        """One command, its attempts and its trail."""
        record = await self._bus.get_command(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no command {id!r} in domain {domain!r}")
        trail = await self._bus.get_audit_trail(domain, id)
        attempts = await self._bus.get_attempts(domain, id)
        process = await self._bus.processes.get_by_command(domain, id)
        return self._page(
            request, "command.html", record=record, trail=trail.items, attempts=attempts.items, process=process
        )

    async def troubleshooting(
        self,
        request: Request,
        domain: str | None = None,
        command_type: str | None = None,
        error_code: str | None = None,
        cursor: str | None = None,
    ) -> Response:
        """Commands that need a person."""
        given = {"domain": domain, "command_type": command_type, "error_code": error_code}
        wanted = {name: value for name, value in given.items() if value}
        queue = AsyncTroubleshootingQueue(self._bus)
        page = await queue.list(
            wanted.get("domain"), wanted.get("command_type"), error_code=wanted.get("error_code"), cursor=cursor
        )
        counts = await queue.count_by_type(**wanted)
        return self._page(
            request, "troubleshooting.html", page=page, counts=counts, total=sum(counts.values()), wanted=wanted
        )

    async def stuck(self, request: Request, cursor: str | None = None) -> Response:
        """Attempts that had to be stopped."""
        return self._page(request, "stuck.html", page=await self._bus.list_stuck(cursor=cursor))

    async def limits(self, request: Request) -> Response:
        """Limits and breakers."""
        limits, breakers = await self._bus.limits(), await self._bus.breakers()
        return self._page(
            request,
            "limits.html",
            limits=limits.items,
            breakers=[item for item in breakers if item.kind == "type"],
        )

    async def schedules(self, request: Request) -> Response:
        """Schedules, and when they fire next."""
        found = (await self._bus.schedules.list()).items
        firings = {
            (item.domain, item.name): await self._bus.schedules.next_firings(item.domain, item.name, count=3)
            for item in found[:100]
        }
        return self._page(request, "schedules.html", schedules=found, firings=firings)

    async def batches(self, request: Request, cursor: str | None = None) -> Response:
        """Batches, newest first."""
        return self._page(request, "batches.html", page=await self._bus.query_batches(cursor=cursor))

    async def batch(self, request: Request, domain: str, id: str, cursor: str | None = None) -> Response:  # noqa: A002
        """One batch and its commands."""
        record = await self._bus.get_batch(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no batch {id!r} in domain {domain!r}")
        members = await self._bus.commands.list_by_batch(domain, id, cursor=cursor)
        return self._page(request, "batch.html", record=record, page=members)

    async def processes(self, request: Request, cursor: str | None = None) -> Response:
        """Processes, newest first."""
        return self._page(request, "processes.html", page=await self._bus.query_processes(cursor=cursor))

    async def process(self, request: Request, domain: str, id: str) -> Response:  # noqa: A002
        """One process and its steps."""
        record = await self._bus.get_process(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no process {id!r} in domain {domain!r}")
        return self._page(request, "process.html", record=record)

    async def workers(self, request: Request) -> Response:
        """Workers: live ones first."""
        found = sorted(await self._bus.workers(), key=lambda item: (item.state == "STOPPED", not item.is_alive))
        return self._page(request, "workers.html", workers=found)

    async def rejected(self, request: Request, domain: str | None = None, cursor: str | None = None) -> Response:
        """Messages that were no commands."""
        page = await self._bus.rejected(domain, cursor=cursor)
        return self._page(request, "rejected.html", page=page, domain=domain)

    def _page(self, request: Request, template: str, **values: Any) -> Response:
        return self._console.page(request, template, **values)


def _now(fleet: Fleet) -> dict[str, Any]:
    found = concerns(fleet)
    return {"headline": headline(found), "concerns": found, "domains": fleet.domains, "workers": [
        worker for worker in fleet.workers if worker.state != "STOPPED"
    ]}  # fmt: skip
