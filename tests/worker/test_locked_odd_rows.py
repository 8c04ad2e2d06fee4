"""A claimed row that cannot simply run, and that needs a row which somebody has locked, is put right as soon as
the lock is gone: long before its lease ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandStatus, HandlerRegistry, Worker
from support.waiting import one, until, verdicts

Db = psycopg.Connection[Any]
StartWorker = Callable[..., Worker]
LEASE_SECONDS = 300.0
LOCK = b"SELECT FROM commandbus.command WHERE command_id = 'x' FOR UPDATE"


@pytest.fixture
def worker(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> Callable[[], Worker]:
    """Starts a worker that knows `pack` and has long leases."""
    caplog.set_level(logging.INFO)
    handlers.register("orders", "pack", lambda ctx: None)

    def start() -> Worker:
        return start_worker(handlers, visibility_timeout=LEASE_SECONDS, concurrency=1)

    return start


def until_left(caplog: pytest.LogCaptureFixture, times: int = 2) -> None:
    """Until the worker has met the lock so often."""
    until(lambda: caplog.text.count("needs a row that somebody has locked") >= times)


def is_completed(bus: CommandBus, command_id: str) -> bool:
    found = bus.get_command("orders", command_id)
    return found is not None and found.status is CommandStatus.COMPLETED


def test_a_command_that_must_be_parked(
    database: str, bus: CommandBus, db: Db, worker: Callable[[], Worker], caplog: pytest.LogCaptureFixture
) -> None:
    bus.send("orders", "ship", command_id="x")
    with psycopg.connect(database) as other:
        other.execute(LOCK)
        worker()
        until_left(caplog)
        bus.send("orders", "pack", command_id="p")
        until(lambda: is_completed(bus, "p"), what="the others go on")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.parked WHERE reason = 'handler'"))
    assert verdicts(db, "x") == [(1, "PARKED")]


def test_a_command_whose_worker_vanished(
    database: str, bus: CommandBus, db: Db, worker: Callable[[], Worker], caplog: pytest.LogCaptureFixture
) -> None:
    bus.send("orders", "pack", command_id="x")
    db.execute(
        """UPDATE pgmq.q_orders__commands SET read_ct = 1, vt = now(),
           headers = jsonb_build_object('held_by', 'gone', 'since', now() - interval '1 hour')"""
    )
    with psycopg.connect(database) as other:
        other.execute(LOCK)
        worker()
        until_left(caplog)
    until(lambda: is_completed(bus, "x"))
    assert verdicts(db, "x") == [(1, "LOST")]


def test_a_raw_message(
    database: str, bus: CommandBus, db: Db, worker: Callable[[], Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody is about to send a command with the same command_id, and does not in the end."""
    message = json.dumps({"command_type": "pack", "command_id": "x", "data": {}})
    db.execute("SELECT pgmq.send('orders__commands', %s::jsonb)", (message,))
    with psycopg.connect(database) as other:
        bus.send("orders", "pack", command_id="x", conn=other)
        worker()
        until_left(caplog)
        other.rollback()
    until(lambda: is_completed(bus, "x"))
    assert verdicts(db, "x") == []


def test_while_the_worker_drains(
    bus: CommandBus, db: Db, database: str, worker: Callable[[], Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that it has left stays leased if the lock is gone before the worker ends."""
    bus.send_many("orders", [{"command_type": "ship", "command_id": id_} for id_ in ("x", "y", "z")])
    with psycopg.connect(database) as other:
        other.execute(b"SELECT FROM commandbus.command FOR UPDATE")
        running = worker()
        until_left(caplog)
        other.rollback()
        running.stop()
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'held_by'") == 0
    assert one(db, "SELECT count(*) FROM commandbus.parked") > 0
