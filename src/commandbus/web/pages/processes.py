"""Processes, and one process with its steps."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.errors import CommandNotFoundError
from commandbus.model.process_graph import process_graph
from commandbus.web.charts import drawn_process
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def processes(request: Request, cursor: str | None = None) -> Response:
        """Processes, newest first."""
        return console.page(request, "processes.html", page=await bus.processes.summaries(cursor=cursor))

    async def process(request: Request, domain: str, id: str) -> Response:  # noqa: A002
        """One process and its steps."""
        record = await bus.processes.view(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no process {id!r} in domain {domain!r}")
        graph = process_graph(record)
        return console.page(request, "process.html", record=record, graph=graph, drawn=drawn_process(graph))

    return {"/processes": processes, "/process": process}
