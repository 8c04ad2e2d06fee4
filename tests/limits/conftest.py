"""Back ends of limits on real servers: `make` starts clients of one fleet, each with connections of its own.

`stores` is parametrised: what the tests of conformance say holds for places in Redis and in PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from limits_harness import QUICK, Client, Maker, declare_limit

from commandbus import Settings
from commandbus.db.service_connection import LastingConnection
from commandbus.limits.limit_connection import LimitConnection
from commandbus.limits.stores.postgres import PostgresPermitStore
from commandbus.limits.stores.redis.store import RedisPermitStore
from support.redis_server import RedisServer


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis of the test's own, to be ill-treated."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def lasting_redis() -> Iterator[RedisServer]:
    """The same, but it writes everything to the disk at once."""
    server = RedisServer(keeps=True)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(params=["redis", "postgres"])
def make(request: pytest.FixtureRequest, database: str, redis_url: str) -> Iterator[Maker]:
    """Makes back ends of one kind on one database; they are closed at the end."""
    opened: list[Callable[[], None]] = []

    def make(name: str = "client") -> Any:
        if request.param == "postgres":
            connection = LastingConnection(Settings(database_url=database), name=name)
            opened.append(connection.close)
            return PostgresPermitStore(LimitConnection(connection))
        store = RedisPermitStore(
            Settings(database_url=database, redis_url=redis_url, environment="test"), name, pace=QUICK
        )
        opened.append(store.close)
        return store

    yield Maker(make, lambda **options: declare_limit(database, store=request.param, **options), request.param)
    for close in opened:
        close()


@pytest.fixture
def start(database: str) -> Iterator[Callable[..., Client]]:
    """Starts clients of Redis limits, each a thread that is alive until the test ends or stops it."""
    started: list[Client] = []

    def start(
        url: str, name: str = "client", *, database_url: str = database, environment: str = "test"
    ) -> Client:
        settings = Settings(database_url=database_url, redis_url=url, environment=environment)
        client = Client(RedisPermitStore(settings, name, pace=QUICK))
        started.append(client)
        return client

    yield start
    for client in started:
        client.stop()
