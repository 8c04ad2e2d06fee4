"""`health_router`: health checks and metrics of a worker that runs inside an application.

    app.include_router(health_router(worker))                      # FastAPI
    Starlette(routes=[Mount("/", health_router(worker))])          # Starlette

    /health/live    200 {"status": "alive"}; 503 if the worker's own threads have stopped
    /health/ready   200 "healthy" or "degraded"; 503 "critical", also while it does not run
    /metrics        for Prometheus

It reads memory only: the database cannot delay an answer. Under a supervisor, the supervisor serves these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from commandbus.supervisor.attempt_metrics import attempt_metrics
from commandbus.supervisor.metrics import CONTENT_TYPE, GAUGE, Metric, Sample, render
from commandbus.worker.async_worker import AsyncWorker
from commandbus.worker.health import HealthState
from commandbus.worker.worker import Worker

if TYPE_CHECKING:
    from fastapi import APIRouter
    from starlette.requests import Request
    from starlette.responses import Response

FROZEN_SECONDS: Final = 5.0


def health_router(worker: Worker | AsyncWorker) -> APIRouter:
    """The routes. They need the extra `web`, and are the same for FastAPI and Starlette."""
    try:
        from fastapi import APIRouter
        from starlette.responses import JSONResponse, PlainTextResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError("health_router needs FastAPI: pip install 'commandbus-pg[web]'") from error
    one = worker.worker if isinstance(worker, AsyncWorker) else worker
    if not isinstance(one, Worker):
        raise TypeError(f"health_router takes a Worker or an AsyncWorker, not {type(worker).__name__}")

    async def live(_request: Request) -> Response:
        reasons = _stopped(one)
        if reasons:
            return JSONResponse({"status": "critical", "reasons": reasons}, 503)
        return JSONResponse({"status": "alive", "reasons": []})

    async def ready(_request: Request) -> Response:
        document = readiness(one)
        return JSONResponse(document, 503 if document["status"] == HealthState.CRITICAL.value else 200)

    async def metrics(_request: Request) -> Response:
        return PlainTextResponse(worker_metrics(one), media_type=CONTENT_TYPE)

    paths = {"/health/live": live, "/health/ready": ready, "/metrics": metrics}
    return APIRouter(routes=[Route(path, answer, methods=["GET"]) for path, answer in paths.items()])


def readiness(worker: Worker) -> dict[str, Any]:
    """Can it take work? The health of the worker, with its reasons."""
    document: dict[str, Any] = worker.health_status.as_dict() | {"state": worker.state}
    reasons = _stopped(worker)
    if worker.state not in ("ACTIVE", "PAUSED"):  # who paused it does not want it restarted
        reasons.append(f"the worker is {worker.state.lower()}")
    if reasons:
        document |= {"status": HealthState.CRITICAL.value, "reasons": [*reasons, *document["reasons"]]}
    return document


def worker_metrics(worker: Worker) -> str:
    """The answer to a scrape: one worker, with the names that a supervisor uses for all of its workers."""
    state = worker.health_status.state
    return render([
        Metric("commandbus_workers", GAUGE, "Worker processes by state.",
               [Sample(1, {"state": worker.state.lower()})]),
        Metric("commandbus_workers_health", GAUGE, "Worker processes by health.",
               [Sample(int(level is state), {"health": level.value}) for level in HealthState]),
        Metric("commandbus_running", GAUGE, "Attempts that run now.", [Sample(worker.running)]),
        *attempt_metrics(worker._counts.read()),
    ])  # fmt: skip


def _stopped(worker: Worker) -> list[str]:
    age = worker.beat_age
    return [] if age is None or age < FROZEN_SECONDS else [f"the worker's ladder has not moved for {age:.0f} s"]
