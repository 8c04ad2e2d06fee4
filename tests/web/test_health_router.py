"""Health checks and metrics of a worker inside an application, in FastAPI and in Starlette."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

from commandbus import CommandBus, HandlerRegistry, Worker, health_router
from support.consoles import served
from support.waiting import until
from support.workers import quick_settings
from web.conftest import Visit


@pytest.fixture
def worker(database: str, bus: CommandBus) -> Iterator[Worker]:
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: None)
    worker = Worker(handlers, settings=quick_settings(database))
    yield worker
    if worker.is_running:
        worker.stop()


def fastapi(worker: Worker) -> FastAPI:
    app = FastAPI()
    app.include_router(health_router(worker))
    return app


def test_its_answers_follow_the_worker(worker: Worker, bus: CommandBus) -> None:
    with served(fastapi(worker)) as port:
        visit = Visit(port)
        assert (visit.get("/health/live").status, visit.get("/health/live").json["status"]) == (200, "alive")
        stopped = visit.get("/health/ready")
        assert (stopped.status, stopped.json["status"]) == (503, "critical")
        assert stopped.json["reasons"] == ["the worker is stopped"]
        worker.start()
        assert visit.get("/health/ready").json["status"] == "healthy"
        worker.health_status.set_degraded("slow_disk", "the disk is slow")
        ready = visit.get("/health/ready")
        assert (ready.status, ready.json["status"]) == (200, "degraded")
        assert "the disk is slow" in ready.json["reasons"][0]
        worker.health_status.set_critical("database_unreachable")
        assert visit.get("/health/ready").status == 503
        worker.health_status.clear("slow_disk")
        worker.health_status.clear("database_unreachable")
        runtime = worker._runtime
        assert runtime is not None
        runtime.ladder.stop(5)
        runtime.ladder.beat_at -= 60
        assert visit.get("/health/live").status == 503
        assert "has not moved for" in visit.get("/health/ready").text


def test_its_metrics_can_be_scraped(worker: Worker, bus: CommandBus) -> None:
    bus.send("orders", "ship")
    worker.start()
    with served(Starlette(routes=[Mount("/inner", health_router(worker))])) as port:  # type: ignore[arg-type]

        def scraped() -> dict[tuple[str, ...], float]:
            answer = Visit(port).get("/inner/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            families = list(text_string_to_metric_families(answer.text))
            return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}

        until(lambda: scraped().get(("commandbus_attempts_total", "orders", "ship", "completed")) == 1)
        assert scraped()["commandbus_workers", "active"] == 1
        assert scraped()["commandbus_workers_health", "healthy"] == 1


def test_what_is_no_worker_is_refused() -> None:
    with pytest.raises(TypeError, match="health_router takes a Worker or an AsyncWorker, not str"):
        health_router("worker")  # type: ignore[arg-type]


def test_without_fastapi_the_error_names_the_extra(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    known = builtins.__import__

    def without_fastapi(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "fastapi":
            raise ImportError(name)
        return known(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_fastapi)
    with pytest.raises(ImportError, match=r"pip install 'commandbus-pg\[web\]'"):
        health_router(worker)
