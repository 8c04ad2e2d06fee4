"""A worker that starts while Redis is down: what waits for a limit begins after two seconds, not after thirty."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, Worker
from support.redis_server import RedisServer
from support.waiting import statuses, within
from support.workers import quick_settings

Start = Callable[..., Worker]


@pytest.fixture
def down(own_redis: RedisServer, request: pytest.FixtureRequest) -> RedisServer:
    """A Redis that refuses connections, or (stopped) takes them and says nothing."""
    if request.param == "refuses":
        own_redis.kill()
    else:
        own_redis.pause()
    return own_redis


@pytest.fixture
def start_worker(database: str) -> Iterator[Start]:
    started: list[Worker] = []

    def start(handlers: HandlerRegistry, redis_url: str) -> Worker:
        worker = Worker(handlers, settings=quick_settings(database, redis_url=redis_url), name="test")
        worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        with contextlib.suppress(Exception):
            worker.stop(wait=4)


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize("down", ["refuses", "is silent"], indirect=True)
def test_what_waits_begins_within_seconds(
    database: str, down: RedisServer, start_worker: Start, parked: bool
) -> None:
    handlers = HandlerRegistry()
    handlers.register("orders", "page", lambda ctx: None, limits=[Limit("docai", concurrency=4)])
    with CommandBus(database) as bus, psycopg.connect(database, autocommit=True) as db:
        bus.create_domain("orders")
        bus.send_many("orders", [NewCommand("page", command_id=f"c{n}") for n in range(6)])
        if parked:  # by a worker that has gone since
            park_all(db)
        start_worker(handlers, down.url)
        within(15, lambda: statuses(db) == {"COMPLETED": 6}, what=lambda: statuses(db))
        down.resume()


def park_all(db: psycopg.Connection[Any]) -> None:
    db.execute(
        "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since, "
        "first_parked_at) SELECT domain, command_type, msg_id, id, 'limit', 'docai', created_at, now() "
        "FROM commandbus.command"
    )
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '10 years', read_ct = 1")
    db.execute("UPDATE commandbus.command SET waived = 1")
