"""Worker processes to kill, a server to restart, and a network to cut."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Worker
from commandbus.db.embedded import EmbeddedPostgres
from support.network import Proxy
from support.workers import quick_settings

Process = subprocess.Popen[bytes]


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
def ledger() -> str:
    """The statement that makes the table `ledger`, which handlers write."""
    return "CREATE TABLE ledger (kind text, command_id text, attempt integer)"


@pytest.fixture
def db(db: psycopg.Connection[Any], ledger: str) -> psycopg.Connection[Any]:
    """A connection in autocommit mode, and the ledger."""
    db.execute(ledger.encode())
    return db


@pytest.fixture
def start_process(database: str) -> Iterator[Callable[..., Process]]:
    """Starts worker processes of `ledger_worker.py`, or of another script here; none outlives the test."""
    started: list[Process] = []
    source = Path(__file__).parents[2] / "src"

    def start(*, script: str = "ledger_worker.py", **settings: Any) -> Process:
        chosen = {
            "database_url": database,
            "concurrency": 4,
            "poll_interval": 0.2,
            "visibility_timeout": 1.5,
            "statement_timeout": 1.0,
            "cancel_grace": 0.5,
            "max_attempts": 50,
        } | settings
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), json.dumps(chosen)],
            env=os.environ | {"PYTHONPATH": str(source)},
            stdin=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Makes and starts workers in this process: `start_worker(handlers, url, …)`."""
    started: list[Worker] = []

    def start(handlers: HandlerRegistry, url: str, **changes: Any) -> Worker:
        worker = Worker(handlers, settings=quick_settings(url, **changes), name="test")
        worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.is_running:
            with contextlib.suppress(Exception):
                worker.stop(wait=3)


@pytest.fixture(scope="module")
def own_server(postgres_binaries: Path | None, module_folder: Path) -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL that the tests of one module may stop, crash and start."""
    postgres = EmbeddedPostgres(module_folder / "own", binaries=postgres_binaries, fsync=False)
    postgres.start()
    try:
        yield postgres
    finally:
        postgres.stop(force=True)


@pytest.fixture(scope="module")
def module_folder(session_folder: Path) -> Path:
    """A folder that the server's user may enter."""
    return session_folder


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """A network between a worker and the session's server."""
    found = re.search(r":(\d+)/", database)
    assert found is not None
    proxy = Proxy(int(found[1]))
    yield proxy
    proxy.close()


@pytest.fixture
def through(database: str, proxy: Proxy) -> str:
    """The address of the database through the proxy."""
    return re.sub(r":\d+/", f":{proxy.port}/", database)
