"""A worker is killed with SIGKILL while it runs a command: the ledger says how long the command was lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Worker
from support.waiting import until, until_settled

pytestmark = pytest.mark.slow
StartWorker = Callable[..., Worker]

PROGRAM = """
import sys, time
from commandbus import HandlerRegistry, Settings, Worker

handlers = HandlerRegistry()
handlers.register("orders", "ship", lambda ctx: time.sleep(600))
settings = Settings(database_url=sys.argv[1], visibility_timeout=3, statement_timeout=1, cancel_grace=0.5)
Worker(handlers, settings=settings).run()
"""


def test_the_time_with_a_killed_worker_is_in_the_ledger(
    database: str,
    bus: CommandBus,
    db: psycopg.Connection[Any],
    handlers: HandlerRegistry,
    start_worker: StartWorker,
) -> None:
    bus.send("orders", "ship", command_id="lost")
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, database])
    try:
        until(lambda: (found := bus.get_ledger("orders", "lost")) and found.attempts, what=program.poll)
        program.send_signal(signal.SIGKILL)
    finally:
        program.kill()
        program.wait()
    running = bus.get_ledger("orders", "lost")
    assert running is not None
    assert running.intervals[-1].state == "running", "nobody has noticed yet"
    handlers.register("orders", "ship", lambda ctx: "done")
    start_worker(handlers)
    until_settled(db)
    ledger = bus.get_ledger("orders", "lost")
    assert ledger is not None
    states = [item.state.value for item in ledger.intervals if item.state != "queued"]
    assert states == ["lost", "running"]
    assert [item.verdict for item in ledger.attempts] == ["LOST", "COMPLETED"]
    assert sum(item.seconds for item in ledger.intervals) == pytest.approx(ledger.seconds)
