"""One test body for both drivers: `bus` is a CommandBus, or an AsyncCommandBus awaited call by call.

`orders` is the same with a domain `orders` in it. `db` is a plain connection that looks at the tables. `database`
is one database for all tests of this folder, emptied before each: ten times faster than a fresh one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from flow_harness import Bus
from psycopg import sql

from commandbus import AsyncCommandBus, AsyncTroubleshootingQueue, CommandBus, TroubleshootingQueue
from commandbus.db.embedded import EmbeddedPostgres


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


_EMPTY = """
DO $$
DECLARE
    name text;
    has_rows boolean;
BEGIN
    PERFORM pgmq.drop_queue(queue_name) FROM pgmq.meta;
    DELETE FROM commandbus.setting WHERE setting.name NOT LIKE 'pgmq%';
    FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'commandbus'::regnamespace AND relkind = 'r'
                                                AND relname NOT IN ('migration', 'setting') LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM commandbus.%I)', name) INTO has_rows;
        IF has_rows THEN
            EXECUTE format('TRUNCATE commandbus.%I', name);
        END IF;
    END LOOP;
    DROP SCHEMA public CASCADE;
    CREATE SCHEMA public;
END $$
"""


@pytest.fixture(scope="session")
def shared_database(
    server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None], migrated_template: str
) -> str:
    """A copy of the migrated database; it goes with the server."""
    server_admin(sql.SQL("CREATE DATABASE shared TEMPLATE {}").format(sql.Identifier(migrated_template)))
    return server.dsn.removesuffix("/postgres") + "/shared"


@pytest.fixture
def database(shared_database: str) -> str:
    """The address of an empty database with the schema of commandbus in it."""
    with psycopg.connect(shared_database, autocommit=True) as conn:
        conn.execute("SET client_min_messages = warning")
        conn.execute("SET lock_timeout = '30s'")
        conn.execute(_EMPTY)
    return shared_database


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
