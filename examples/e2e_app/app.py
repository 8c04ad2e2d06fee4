"""A web application that sends commands, looks at them, and says how its worker is.

    COMMANDBUS_DATABASE_URL=postgresql://… python -m uvicorn app:app --port 8080

    GET  /health/live          {"status": "alive"}: this process runs
    GET  /health/ready         200 healthy or degraded, 503 critical: the state of the worker
    POST /commands/{type}      send a command
    GET  /commands/{id}        what became of it

The worker runs in this process, beside the web server. `worker.py` runs the same worker in a process of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
from dependencies import get_bus, get_pool, get_watchdog, get_worker
from fastapi import Body, Depends, FastAPI, HTTPException, Response
from handlers import DOMAIN

from commandbus import DuplicateCommandError
from commandbus.sync import HealthState, SyncCommandBus, SyncWorker

Bus = Annotated[SyncCommandBus, Depends(get_bus)]
RunningWorker = Annotated[SyncWorker, Depends(get_worker)]
TABLE = "CREATE TABLE IF NOT EXISTS e2e_order (order_id text PRIMARY KEY, quantity int NOT NULL)"


def set_up() -> None:
    """The schema, the domain, the application's table, and the worker."""
    get_bus().migrate(domains=[DOMAIN])
    with get_pool().connection() as conn:
        conn.execute(TABLE)
    get_worker().start()
    get_watchdog().start()


def tear_down() -> None:
    """In order: what runs has shutdown_timeout to finish."""
    get_watchdog().stop()
    if get_worker().is_running:  # else the watchdog has stopped it
        get_worker().stop()
    get_bus().close()
    get_pool().close()


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Blocking calls have threads of their own: the event loop is the web server's."""
    await anyio.to_thread.run_sync(set_up)
    yield
    await anyio.to_thread.run_sync(tear_down)


app = FastAPI(lifespan=lifespan)


@app.get("/health/live")
def liveness() -> dict[str, str]:
    """Am I running at all?"""
    return {"status": "alive"}


@app.get("/health/ready", response_model=None)
def readiness(worker: RunningWorker) -> Response | dict[str, Any]:
    """Am I ready to process messages?"""
    status = worker.health_status
    if status.state is HealthState.CRITICAL or not worker.is_running:
        return Response('{"status": "critical"}', status_code=503, media_type="application/json")
    return {"status": status.state.value}  # degraded: still accept traffic


@app.post("/commands/{command_type}", status_code=202)
def send(bus: Bus, command_type: str, data: Annotated[Any, Body()] = None, command_id: str | None = None) -> Any:
    """Send a command; the same id twice is the same command."""
    try:
        sent = bus.send(DOMAIN, command_type, data, command_id=command_id)
    except DuplicateCommandError as error:
        raise HTTPException(409, str(error)) from error
    return {"command_id": sent.command_id, "created": sent.created}


@app.get("/commands/{command_id}")
def look(bus: Bus, command_id: str) -> Any:
    """Its status, its result or error, and its audit trail."""
    found = bus.get_command(DOMAIN, command_id)
    if found is None:
        raise HTTPException(404, f"there is no command {command_id!r}")
    trail = [entry.event for entry in bus.get_audit_trail(DOMAIN, command_id)]
    return {"status": found.status, "result": found.result, "error": found.error, "events": trail}
