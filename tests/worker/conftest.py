"""A bus, a look at the tables, and workers that are stopped at the end of each test, whatever became of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commandbus import CommandBus, HandlerRegistry, RetryPolicy, Worker
from support.workers import quick_settings

StartWorker = Callable[..., Worker]


@pytest.fixture
def has_orders() -> str:
    """`bus` has it."""
    return "bus"


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    """A bus on a migrated database with a domain `orders`."""
    with CommandBus(database) as bus:
        yield bus


@pytest.fixture
def handlers() -> HandlerRegistry:
    """A fresh registry."""
    return HandlerRegistry()


@pytest.fixture(params=["sync", "async"])
def lane(request: pytest.FixtureRequest) -> str:
    """Which kind of handler."""
    return str(request.param)


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """What handlers wait for; opened at the end of the test, so that none stays behind."""
    go_on = threading.Event()
    yield go_on
    go_on.set()


@pytest.fixture
def start_worker(database: str, bus: CommandBus, go_on: threading.Event) -> Iterator[StartWorker]:
    """Makes and starts workers: `start_worker(handlers, concurrency=2, …)`."""
    started: list[Worker] = []

    def start(
        handlers: HandlerRegistry,
        *,
        retry_policy: RetryPolicy | None = None,
        domains: list[str] | None = None,
        pool: Any = None,
        url: str | None = None,
        **changes: Any,
    ) -> Worker:
        worker = Worker(
            handlers,
            domains=domains,
            settings=quick_settings(url or database, **changes),
            retry_policy=retry_policy,
            pool=pool,
            name="test",
        )
        worker.start()
        started.append(worker)
        return worker

    yield start
    go_on.set()
    for worker in started:
        if worker.is_running:
            with contextlib.suppress(Exception):
                worker.stop(wait=4)
