"""One test body for both drivers: `bus` is a CommandBus, or an AsyncCommandBus awaited call by call.

`orders` is the same with a domain `orders` in it. `db` is a plain connection that looks at the tables.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from flow_harness import Bus

from commandbus import AsyncCommandBus, AsyncTroubleshootingQueue, CommandBus, TroubleshootingQueue


class _Awaited:
    """An async object whose coroutine methods are run to their end on one event loop."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not inspect.iscoroutinefunction(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._runner.run(found(*args, **kwargs))

        return call


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Bus]]:
    """Makes buses over one of the drivers, and closes them."""
    opened: list[Any] = []
    with asyncio.Runner() as runner:

        def connect(url: str, **options: Any) -> Bus:
            if request.param == "sync":
                bus: Any = CommandBus(url, **options)
                tsq: Any = TroubleshootingQueue(bus)
            else:
                target = AsyncCommandBus(url, **options)
                bus = _Awaited(target, runner)
                tsq = _Awaited(AsyncTroubleshootingQueue(target), runner)
            opened.append(bus)
            return Bus(bus, tsq, request.param, url, runner)

        yield connect
        for bus in opened:
            bus.close()


@pytest.fixture
def bus(connect: Callable[..., Bus], database: str) -> Bus:
    """A bus on a migrated database without domains."""
    return connect(database)


@pytest.fixture
def orders(bus: Bus) -> Bus:
    """The same with a domain `orders`."""
    bus.create_domain("orders")
    return bus


@pytest.fixture
def db(database: str) -> Iterator[psycopg.Connection[Any]]:
    """A plain connection in autocommit mode."""
    with psycopg.connect(database, autocommit=True) as conn:
        yield conn
