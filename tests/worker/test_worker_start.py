"""Starting: a database that is away is waited for, and whoever asks the worker to stop meanwhile is heard."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, HealthState, Worker
from support.network import Proxy
from support.waiting import Stopwatch, until, until_settled
from support.workers import quick_settings

Db = psycopg.Connection[Any]
SOURCES = str(Path(__file__).parents[2] / "src")
PROGRAM = """
import logging, sys
from commandbus import HandlerRegistry, Worker

logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
handlers = HandlerRegistry()
handlers.register("orders", "ship", lambda command, ctx: None)
print("starts", flush=True)
report = Worker(handlers, database_url=sys.argv[1]).run()
print(report.reason, report.is_clean, flush=True)
"""


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """A network between the worker and the database. Nobody gets through at first."""
    found = re.search(r":(\d+)/", database)
    assert found is not None
    proxy = Proxy(int(found[1]))
    proxy.is_refusing = True
    yield proxy
    proxy.close()


@pytest.fixture
def worker(database: str, bus: CommandBus, proxy: Proxy, handlers: HandlerRegistry) -> Worker:
    """A worker whose database is behind the proxy."""
    handlers.register("orders", "ship", lambda command, ctx: None)
    return Worker(handlers, settings=quick_settings(_through(database, proxy)), name="test")


def _through(database: str, proxy: Proxy) -> str:
    return re.sub(r":\d+/", f":{proxy.port}/", database)


def test_a_start_waits_for_the_database_and_says_so(worker: Worker, proxy: Proxy, bus: CommandBus, db: Db) -> None:
    bus.send("orders", "ship")
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(worker.start)
        until(lambda: worker.health_status.state is HealthState.CRITICAL)
        assert worker.state == "STARTING"
        assert not worker.is_running
        assert f"port {proxy.port}" in worker.health_status.reasons[0]
        with pytest.raises(RuntimeError, match="started already"):
            worker.start()
        proxy.is_refusing = False
        assert starting.result(20)
    assert worker.health_status.state is HealthState.HEALTHY
    until_settled(db)
    assert worker.stop().settled == 1


@pytest.mark.parametrize("prepared", [True, False], ids=["direct", "behind_a_pooler"])
def test_a_start_does_not_wait_for_an_answer_without_end(
    database: str,
    bus: CommandBus,
    handlers: HandlerRegistry,
    db: Db,
    prepared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server takes the question, and somebody's lock keeps the answer back. Behind a pooler only our own
    clock can end that."""
    monkeypatch.setattr("commandbus.db.service_connection.STATEMENT_SECONDS", 1.0)
    handlers.register("orders", "ship", lambda command, ctx: None)
    bus.send("orders", "ship")
    settings = quick_settings(database, prepared_statements=prepared)
    worker = Worker(handlers, settings=settings, name="test")
    with ThreadPoolExecutor(1) as thread, psycopg.connect(database) as holder:
        holder.execute("LOCK TABLE commandbus.migration IN ACCESS EXCLUSIVE MODE")
        starting = thread.submit(worker.start)
        until(lambda: worker.health_status.state is HealthState.CRITICAL)
        assert "waiting for the database: canceling statement" in worker.health_status.reasons[0]
        holder.rollback()
        assert starting.result(20)
    until_settled(db)
    assert worker.stop().settled == 1


@pytest.mark.parametrize("silent", [False, True])
def test_request_stop_ends_the_wait_at_once(worker: Worker, proxy: Proxy, silent: bool) -> None:
    if silent:
        proxy.is_refusing = False
        proxy.hearing.clear()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.run)
        until(lambda: worker.state == "STARTING")
        stopwatch = Stopwatch()
        worker.request_stop("enough")
        report = running.result(5)
    assert stopwatch.seconds() < 2
    assert (report.reason, report.is_clean, worker.state) == ("enough", True, "STOPPED")


def test_a_worker_that_was_stopped_before_it_had_started_can_be_started_again(
    worker: Worker, proxy: Proxy, bus: CommandBus, db: Db
) -> None:
    worker.request_stop("enough")
    assert not worker.start()
    proxy.is_refusing = False
    bus.send("orders", "ship")
    with worker:
        until_settled(db)
    worker.request_stop("said after the run that it was meant for")
    assert worker.run(until_idle=True).is_clean


def test_a_with_block_whose_start_was_stopped_ends_in_order(worker: Worker) -> None:
    worker.request_stop("enough")
    with worker:
        assert not worker.is_running


def test_without_patience_the_error_is_raised(database: str, proxy: Proxy, handlers: HandlerRegistry) -> None:
    handlers.register("orders", "ship", lambda command, ctx: None)
    settings = quick_settings(_through(database, proxy), wait_for_database=False)
    with pytest.raises(psycopg.OperationalError):
        Worker(handlers, settings=settings).run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("silent", [False, True])
def test_a_signal_while_run_starts_is_not_lost(
    database: str, bus: CommandBus, proxy: Proxy, number: signal.Signals, silent: bool
) -> None:
    if silent:  # the server takes the connection, and says nothing
        proxy.is_refusing = False
        proxy.hearing.clear()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, _through(database, proxy)],
        env=os.environ | {"PYTHONPATH": SOURCES},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "starts\n"
        if silent:
            until(lambda: proxy.connections)
        else:
            assert "this start waits for it" in process.stderr.readline()
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name} True\n"
        assert process.wait(10) == 0


def test_a_signal_in_the_midst_of_a_good_start_is_not_lost(database: str, bus: CommandBus) -> None:
    """It comes after the signals are caught and before anything runs: then the event was cleared once more."""
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: None)
    worker = Worker(handlers, settings=quick_settings(database))
    check = worker._check_database

    def check_and_signal(settings: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        check(settings)

    worker._check_database = check_and_signal  # type: ignore[method-assign]
    watchdog = threading.Timer(20, lambda: worker.request_stop("nobody heard the signal"))
    watchdog.start()
    try:
        assert worker.run().reason == "SIGTERM"
    finally:
        watchdog.cancel()


@pytest.mark.parametrize("given", [None, {}, "app:handlers", HandlerRegistry])
def test_what_is_no_registry_is_told(given: Any) -> None:
    with pytest.raises(TypeError, match="Worker takes a HandlerRegistry, not "):
        Worker(given, database_url="postgresql://nowhere")
