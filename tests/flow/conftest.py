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
from flow_harness import Bus, Roles
from psycopg import sql as pgsql

from commandbus import AsyncCommandBus, AsyncTroubleshootingQueue, CommandBus, TroubleshootingQueue
from commandbus.model.roles import KINDS


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
def has_orders() -> str:
    """`orders` has it."""
    return "orders"


@pytest.fixture
def bus(connect: Callable[..., Bus], database: str) -> Bus:
    """A bus on a migrated database without domains."""
    return connect(database)


@pytest.fixture
def orders(bus: Bus) -> Bus:
    """The same with a domain `orders`."""
    return bus


@pytest.fixture
def prefix(orders: Bus) -> Iterator[str]:
    """A prefix of roles that are gone after the test: roles belong to the server, not to the database."""
    name = f"r_{orders.url.rsplit('/', 1)[1]}"
    yield name
    with psycopg.connect(orders.url, autocommit=True) as conn:
        for (role,) in conn.execute(
            "SELECT rolname FROM pg_roles WHERE rolname LIKE %s", (name + "%",)
        ).fetchall():
            conn.execute(pgsql.SQL("DROP OWNED BY {}").format(pgsql.Identifier(role)))
            conn.execute(pgsql.SQL("DROP ROLE {}").format(pgsql.Identifier(role)))


@pytest.fixture
def acting(orders: Bus, prefix: str, connect: Callable[..., Bus], db: psycopg.Connection[Any]) -> Roles:
    """A bus of a login user that has one role."""
    assert orders.create_roles(prefix) == {kind: f"{prefix}_{kind}" for kind in KINDS}

    def acting(kind: str) -> Bus:
        user = f"{prefix}_{kind}_user"
        db.execute(f"CREATE ROLE {user} LOGIN IN ROLE {prefix}_{kind}".encode())
        return connect(orders.url.replace("//postgres@", f"//{user}@", 1))

    return acting


@pytest.fixture
def part(bus: Bus) -> Callable[[str], Any]:
    """A part of the bus by its name (`queues`, `commands`, …), with sync manners."""

    def part(name: str, of: Bus | None = None) -> Any:
        owner = of or bus
        found = getattr(owner.bus, name)
        return found if owner.driver == "sync" else _Awaited(found, owner.runner)

    return part
