"""The console as an ASGI application: its buses, its visitors, and what every answer has in common.

Pages read through a bus with a statement timeout of two seconds and at most `connections` connections. Actions
have a bus of their own with one connection, because a change of many commands may take longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from psycopg.conninfo import conninfo_to_dict

from commandbus.bus import AsyncCommandBus
from commandbus.bus.masked import async_bus_for_people
from commandbus.clock import monotonic
from commandbus.db.drivers import limit_statement
from commandbus.flow.commands.failures import FailureGroup
from commandbus.settings import Settings
from commandbus.troubleshooting import AsyncTroubleshootingQueue
from commandbus.web.access import Access, Visitor
from commandbus.web.attention import Fleet
from commandbus.web.live import Watched
from commandbus.web.rendering import environment

READ_SECONDS: Final = 2
ACT_SECONDS: Final = 60
LOCK_SECONDS: Final = 2  # all actions share one connection: one that waits for a lock holds up the others
CONNECTIONS: Final = 4
FAILURES_SECONDS: Final = 10.0
_PAGES: Final = (
    ("", "Now"), ("commands", "Commands"), ("troubleshooting", "Troubleshooting"), ("plans", "Plans"),
    ("stuck", "Stuck"), ("limits", "Limits"), ("keys", "Keys"), ("schedules", "Schedules"), ("batches", "Batches"),
    ("processes", "Processes"), ("effects", "Effects"), ("workers", "Workers"), ("domains", "Domains"),
    ("database", "Database"), ("audit", "Audit"),
)  # fmt: skip


class Console:
    """What pages, actions and API share."""

    def __init__(
        self, settings: Settings, access: Access, *, connections: int = CONNECTIONS, handlers: str | None = None
    ) -> None:
        self.settings = settings
        self.handlers = handlers  # MODULE:REGISTRY; with it, commands can be rehearsed here
        self.access = access
        self.reading = _bus(settings, READ_SECONDS, connections)
        self.acting = _bus(settings, ACT_SECONDS, 1)
        self.watched = Watched(self.now)
        self._known_failures: list[FailureGroup] = []
        self._failures_at = -FAILURES_SECONDS
        self.looking = asyncio.Semaphore(1)  # searches that go on by themselves

    @property
    def role(self) -> str:
        """The role with which it connects, as its address says it."""
        url = self.settings.database_url
        found = None if not url or url.startswith("embedded") else conninfo_to_dict(url).get("user")
        return str(found or "")

    async def now(self) -> Fleet:
        """One look at everything that `Now` shows."""
        return replace(await self.fleet(), hours=(await self.reading.last_hour()).items)

    async def fleet(self) -> Fleet:
        """One look at what may need a person. Workers publish their slots from now on, for some seconds."""
        in_tsq = await AsyncTroubleshootingQueue(self.reading).count_by_type()
        return Fleet(
            (await self.reading.status()).items,
            (await self.reading.workers()).items,
            (await self.reading.limits()).items,
            (await self.reading.breakers()).items,
            in_tsq,
            slots=(await self.reading.watch_slots()).items,
            failures=await self._failures() if in_tsq else [],
        )

    async def _failures(self) -> list[FailureGroup]:
        """Failures of commands that need a person, as of some seconds ago: they cost more than the rest."""
        if monotonic() - self._failures_at > FAILURES_SECONDS:
            self._known_failures = (await self.reading.list_failures(in_troubleshooting=True)).items
            self._failures_at = monotonic()
        return self._known_failures

    @asynccontextmanager
    async def running(self, _app: FastAPI) -> AsyncIterator[None]:
        """The life of the application. One that is mounted must be closed by its host."""
        yield
        await self.close()

    async def close(self) -> None:
        """Close what it opened."""
        await self.watched.close()
        await self.reading.close()
        await self.acting.close()

    def page(self, request: Request, template: str, *, status_code: int = 200, **values: Any) -> Response:
        """A page of the console for the visitor of this request."""
        visitor: Visitor | None = getattr(request.state, "visitor", None)
        text = (
            environment()
            .get_template(template)
            .render(
                root=str(request.scope.get("root_path", "")),
                here=request.url.path.rpartition("/")[2],
                pages=_PAGES,
                status_code=status_code,
                visitor=visitor,
                handlers=self.handlers,
                signs_out=self.access.has_tokens,
                mark="" if visitor is None else self.access.csrf_mark(visitor),
                given=dict(request.query_params),
                **values,
            )
        )
        return HTMLResponse(text, status_code=status_code)


def _bus(settings: Settings, seconds: int, connections: int) -> AsyncCommandBus:
    """A bus whose statements end after so many seconds."""
    modest = replace(settings, pool_min_size=0, pool_max_size=connections, pool_timeout=float(2 * seconds))
    bus = async_bus_for_people(modest)
    bus._session_name = "console"
    bus._limit = limit_statement(seconds, lock_seconds=LOCK_SECONDS)
    return bus
