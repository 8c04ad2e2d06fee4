"""The console in bad company: a killed worker, a restarted PostgreSQL, many streams, a visitor who never reads."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, Settings
from commandbus.db.embedded import EmbeddedPostgres
from commandbus.web.app import create_console
from commandbus.web.event_stream import EventStream
from support.consoles import served
from support.page_timeouts import page_timeouts
from support.waiting import until
from web.conftest import Visit

pytestmark = pytest.mark.slow

CONNECTIONS = 2
STREAMS = 50
SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend' AND application_name LIKE 'commandbus%%'"
)


class Stream:
    """Somebody who has *Now* open. What they have not read yet waits in the kernel's buffers."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(b"GET /now/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        self._socket.settimeout(0.01)
        self.text = ""

    def says(self, text: str) -> bool:
        """Has it been told this by now?"""
        try:
            while received := self._socket.recv(65536):
                self.text += received.decode()
        except TimeoutError:
            pass
        return text in self.text

    def close(self) -> None:
        self._socket.close()


def test_fifty_streams_cost_what_one_costs_and_a_slow_one_holds_up_nobody(database: str, bus: CommandBus) -> None:
    app = create_console(Settings(database_url=database), connections=CONNECTIONS)
    watched = app.state.console.watched
    watched._seconds = 0.02  # as many states as in a quarter of an hour
    with served(app) as port, ExitStack() as stack, psycopg.connect(database, autocommit=True) as db:
        slow = stack.enter_context(closing(Stream(port)))  # it never reads
        streams = [stack.enter_context(closing(Stream(port))) for _ in range(STREAMS - 1)]
        until(lambda: all(one.says("Nothing needs you.") for one in streams))
        assert watched._watchers == STREAMS
        bus.pause("orders", operator="ann")
        until(lambda: all(one.says("orders is paused: all of it") for one in streams))
        for _ in range(20):
            assert Visit(port).get("/commands").status == 200
        own = 1  # the bus of this test
        assert _count(db) - own <= CONNECTIONS + 1
        slow.close()
        for one in streams:
            one.close()
        until(lambda: watched._watchers == 0)
        until(lambda: watched._reader is None)  # nobody looks, so nothing is read


def test_a_stream_whose_visitor_leaves_without_reading_is_closed() -> None:
    """Not by the garbage collector: the test keeps the generator."""
    is_sending, ends = asyncio.Event(), []

    async def events() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "data: one more\n\n"
        finally:
            ends.append("closed")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            is_sending.set()
            await asyncio.Event().wait()  # the buffers are full, and nobody reads

    async def receive() -> dict[str, str]:
        await is_sending.wait()
        return {"type": "http.disconnect"}

    async def visit() -> list[str]:
        generator = events()
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
        await asyncio.wait_for(EventStream(generator)(scope, receive, send), 30)
        return list(ends)  # before the loop ends, which closes what is left

    assert asyncio.run(visit()) == ["closed"]


def _count(db: psycopg.Connection[Any]) -> int:
    row = db.execute(SESSIONS.replace("%%", "%").encode()).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def own_server(folder: Path, postgres_binaries: Path | None) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(folder / "own", binaries=postgres_binaries, fsync=False)
    server.start()
    try:
        yield server
    finally:
        server.stop(force=True)


def test_the_console_outlives_its_server(own_server: EmbeddedPostgres) -> None:
    url = own_server.dsn
    with CommandBus(url) as bus:
        bus.migrate(domains=["orders"])
    app = create_console(Settings(database_url=url), connections=CONNECTIONS)
    with served(app) as port, closing(Stream(port)) as stream:
        visit = Visit(port)
        until(lambda: stream.says("Nothing needs you."))
        pid = own_server.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGQUIT)
        until(lambda: not own_server.running, 20)
        until(lambda: stream.says("event: trouble"), 30)
        away = visit.get("/domains")
        assert (away.status, visit.get("/health/ready").status) == (503, 503)
        assert "data-retry" in away.text  # the script opens it as soon as it can be opened
        assert visit.get("/health/live").status == 200
        assert own_server.start() == url
        until(lambda: visit.get("/domains").status == 200, 30)
        before = stream.text.count("Nothing needs you.")
        until(lambda: stream.says("") and stream.text.count("Nothing needs you.") > before, 30)
        assert visit.get("/health/ready").status == 200
        with psycopg.connect(url, autocommit=True) as db:
            until(lambda: _count(db) <= CONNECTIONS + 1)


@pytest.mark.waits
def test_a_killed_worker_is_named(database: str, bus: CommandBus) -> None:
    program = (
        "import sys; from commandbus import HandlerRegistry, Worker; handlers = HandlerRegistry()\n"
        "handlers.register('orders', 'ship', lambda command, ctx: None)\n"
        "Worker(handlers, database_url=sys.argv[1], name='doomed').run()"
    )
    with served(create_console(Settings(database_url=database))) as port, closing(Stream(port)) as stream:
        process = subprocess.Popen([sys.executable, "-c", program, database])
        try:
            until(lambda: stream.says("doomed") and stream.says("active"), 30)
        finally:
            process.kill()
            process.wait()
        until(lambda: stream.says("worker doomed") and stream.says("has been silent for"), 60)
        bus.send("orders", "ship")
        until(lambda: stream.says("1 command of orders could run, but no worker serves it"), 30)
        assert Visit(port).get("/workers").status == 200


def test_a_page_has_two_seconds_on_an_embedded_server_too(tmp_path: Path) -> None:
    assert page_timeouts(Settings(database_url=f"embedded:{tmp_path / 'state'}")) == [
        ("2s", "2s"),
        ("1min", "2s"),
    ]
