"""The console's /metrics: the fleet as the database knows it.

Every figure is bounded: counts end at 10,000, and at most MOST_DOMAINS domains are counted. However many ask, the
database is asked once in FRESH_SECONDS. If it does not answer, `commandbus_database_up` is 0 and the rest is
missing. If it refuses (somebody has locked a table, there is no schema), only the rest is missing, and the log
says why.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Final

import psycopg
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from psycopg_pool import PoolTimeout

from commandbus.bus import AsyncCommandBus
from commandbus.clock import monotonic
from commandbus.errors import CommandBusError, SchemaError
from commandbus.flow.commands.inspect import WorkerInfo
from commandbus.flow.commands.rescue import claimable_work
from commandbus.flow.limits.metrics import figures
from commandbus.logger import safe_logger
from commandbus.supervisor.fleet_metrics import domain_metrics, shared_metrics
from commandbus.supervisor.metrics import CONTENT_TYPE, GAUGE, Metric, Sample, render
from commandbus.web.console import Console
from commandbus.worker.health import HealthState

logger = safe_logger("commandbus.console")
FRESH_SECONDS: Final = 3.0
MOST_DOMAINS: Final = 100


def add_metrics(app: FastAPI, console: Console) -> None:
    """Serve /metrics."""
    figures_of_fleet = FleetMetrics(console.reading)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return PlainTextResponse(await figures_of_fleet.text(), media_type=CONTENT_TYPE)


class FleetMetrics:
    """The text of the last look, for as long as it is fresh."""

    def __init__(self, bus: AsyncCommandBus) -> None:
        self._bus = bus
        self._text = ""
        self._read_at = -FRESH_SECONDS
        self._reading = asyncio.Lock()

    async def text(self) -> str:
        """The answer to a scrape."""
        async with self._reading:
            if monotonic() - self._read_at >= FRESH_SECONDS:
                try:
                    metrics = [*await self._read(), _up(is_up=True)]
                except (CommandBusError, psycopg.Error, PoolTimeout) as error:
                    logger.warning("/metrics has no figures of the fleet: %s", error)
                    metrics = [_up(is_up=_is_refusal(error))]
                self._text, self._read_at = render(metrics), monotonic()
            return self._text

    async def _read(self) -> list[Metric]:
        domains = [domain.name for domain in (await self._bus.list_domains()).items[:MOST_DOMAINS]]
        work = {domain: await self._bus.run(claimable_work(domain)) for domain in domains}
        workers = [worker for worker in await self._bus.workers() if worker.is_alive]
        shared = await self._bus.run(figures(domains))
        return [*domain_metrics(work), *shared_metrics(shared), *_worker_metrics(workers)]


def _worker_metrics(workers: Iterable[WorkerInfo]) -> list[Metric]:
    found = list(workers)
    health = Counter(str((worker.health or {}).get("state")) for worker in found)
    return [
        Metric("commandbus_fleet_workers", GAUGE, "Live worker processes of the whole fleet by health.",
               [Sample(health[level.value], {"health": level.value}) for level in HealthState]),
        Metric("commandbus_fleet_running", GAUGE, "Attempts that run in the whole fleet.",
               [Sample(sum(worker.running for worker in found))]),
    ]  # fmt: skip


def _is_refusal(error: Exception) -> bool:
    """Did the database answer, though with an error?"""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, SchemaError)
    return error.sqlstate is not None and not error.sqlstate.startswith(("08", "57P"))  # lost, or shutting down


def _up(*, is_up: bool) -> Metric:
    return Metric("commandbus_database_up", GAUGE, "1 while the database answers.", [Sample(int(is_up))])
