"""Plans: what operators do to many commands, before, while and after it happens."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.flow.plans.operate import check_plan_id
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes

SAMPLE = 20


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def plans(request: Request, domain: str | None = None, cursor: str | None = None) -> Response:
        """Plans, newest first."""
        page = await bus.plans.list(domain or None, cursor=cursor)
        return console.page(request, "plans.html", page=page)

    async def plan(request: Request, id: str, cursor: str | None = None) -> Response:  # noqa: A002 - the link's own
        """One plan."""
        found = await bus.plans.get(check_plan_id(id))
        page = await bus.plans.commands(found.id, limit=SAMPLE, cursor=cursor)
        workers = 0
        if not found.state.is_final:
            known = await bus.workers()
            workers = sum(worker.is_alive and found.domain in worker.domains for worker in known)
        return console.page(request, "plan.html", plan=found, page=page, workers=workers)

    return {"/plans": plans, "/plan": plan}
