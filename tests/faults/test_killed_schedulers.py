"""Workers killed while they fire, and a server that restarts: every firing is made, and none twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Worker
from commandbus.db.embedded import EmbeddedPostgres
from commandbus.model.schedule import command_id_of
from support.waiting import one, until

pytestmark = [pytest.mark.slow, pytest.mark.shared_setup]
Db = psycopg.Connection[Any]
Process = subprocess.Popen[bytes]
PROGRAM = """
import sys; sys.path[:0] = {paths!r}
from commandbus import HandlerRegistry, Worker
from support.workers import quick_settings
handlers = HandlerRegistry()
@handlers.schedule("orders", "tick", every="1s", missed="run_all")
def tick(command, ctx): ...
Worker(handlers, settings=quick_settings({url!r})).run()
"""
FIRINGS = "SELECT (headers->>'scheduled_for')::timestamptz FROM commandbus.command ORDER BY 1"


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    """Starts worker processes that declare a schedule; none outlives the test."""
    started: list[Process] = []

    def start(url: str) -> Process:
        paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM.format(paths=paths, url=url)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def instants(db: Db) -> list[Any]:
    return [row[0] for row in db.execute(FIRINGS).fetchall()]


def assert_each_once(found: list[Any]) -> None:
    assert found == [found[0] + timedelta(seconds=n) for n in range(len(found))]


def test_workers_are_killed_again_and_again(
    start: Callable[[str], Process], database: str, bus: CommandBus, db: Db
) -> None:
    workers = [start(database) for _ in range(3)]
    until(lambda: instants(db), 30)
    for seed in range(4):
        last = instants(db)[-1]
        until(lambda last=last: instants(db)[-1] > last, 30)  # a firing was made at this moment: kill who may have
        victim = random.Random(seed).randrange(3)
        workers[victim].kill()
        workers[victim].wait()
        workers[victim] = start(database)
    count = len(instants(db))
    until(lambda: len(instants(db)) > count + 2, 30)
    assert_each_once(instants(db))
    assert one(db, "SELECT count(*) FROM commandbus.schedule") == 1


def test_a_worker_is_killed_in_the_middle_of_its_statement(
    start: Callable[[str], Process], database: str, bus: CommandBus, db: Db
) -> None:
    first = start(database)
    until(lambda: instants(db), 30)
    with psycopg.connect(database) as holder:
        # The id of a firing that is to come: the statement that makes it waits here, its row locked.
        last = instants(db)[-1]
        for n in range(1, 5):
            holder.execute(
                "INSERT INTO commandbus.command (domain, command_id, command_type) VALUES ('orders', %s, 'tick') "
                "ON CONFLICT DO NOTHING",
                (command_id_of("tick", last + timedelta(seconds=n)),),
            )
        until(lambda: one(db, "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"))
        first.kill()
        first.wait()
        second = start(database)
        until(lambda: one(db, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%scheduler%' "
                              "AND wait_event_type IS DISTINCT FROM 'Lock'"))  # fmt: skip
        count = len(instants(db))
        holder.rollback()
    until(lambda: len(instants(db)) > count + 4, 30)
    assert_each_once(instants(db))
    assert second.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_the_server_restarts(
    own_server: EmbeddedPostgres, start_worker: Callable[..., Worker], number: signal.Signals
) -> None:
    name = f"schedules{number.name.lower()}"
    with psycopg.connect(own_server.dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name}".encode())
    url = own_server.dsn_of(name)
    with CommandBus(url) as bus:
        bus.migrate(domains=["orders"])
    handlers = HandlerRegistry()
    handlers.schedule("orders", "tick", every="1s", missed="run_all")(lambda command, ctx: None)
    for _ in range(2):
        start_worker(handlers, url=url)
    with psycopg.connect(url, autocommit=True) as db:
        until(lambda: len(instants(db)) >= 2, 30)
    pid = own_server.status().pid
    assert pid is not None
    os.kill(pid, number)
    until(lambda: not own_server.running, 20)
    own_server.start()
    with psycopg.connect(url, autocommit=True) as db:
        count = len(instants(db))
        until(lambda: len(instants(db)) > count + 2, 30)
        assert_each_once(instants(db))
