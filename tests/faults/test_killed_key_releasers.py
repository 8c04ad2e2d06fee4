"""Workers killed while commands of keys run and are released: no two of a key at once, all in order."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, NewCommand
from support.waiting import one, until

pytestmark = [pytest.mark.slow, pytest.mark.shared_setup]
Db = psycopg.Connection[Any]
Process = subprocess.Popen[bytes]
KEYS = 6
EACH = 40
MOST_RELEASED = """
SELECT max(n) FROM (SELECT count(*) AS n FROM commandbus.keyed WHERE state = 'RELEASED' GROUP BY key) counted
"""
PROGRAM = """
import sys; sys.path[:0] = {paths!r}
import time
from commandbus import HandlerRegistry, Worker
from support.workers import quick_settings, short_lease
handlers = HandlerRegistry()
@handlers.handler("orders", "ship")
def ship(command, ctx):
    key, number = command.data
    with ctx.connection() as conn:
        alone = conn.execute("SELECT pg_try_advisory_lock(77, %s)", [key]).fetchone()[0]
        time.sleep(0.01)
        conn.execute("INSERT INTO ran (key, number, alone) VALUES (%s, %s, %s)", [key, number, alone])
        conn.execute("SELECT pg_advisory_unlock(77, %s)", [key])
Worker(handlers, settings=quick_settings({url!r}, **short_lease())).run()
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    """Starts worker processes; none outlives the test."""
    started: list[Process] = []

    def start(url: str) -> Process:
        paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM.format(paths=paths, url=url)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_workers_are_killed_again_and_again(
    start: Callable[[str], Process], database: str, bus: CommandBus, db: Db
) -> None:
    db.execute("CREATE TABLE ran (seq bigserial, key integer, number integer, alone boolean)")
    bus.key_limits.set("orders", "account", ordered=True)
    bus.send_many(
        "orders",
        [
            NewCommand("ship", [key, number], key_limit="account", key=str(key), max_attempts=100)
            for number in range(EACH)
            for key in range(KEYS)
        ],
    )
    workers = [start(database) for _ in range(3)]
    for seed in range(4):
        before = one(db, "SELECT count(*) FROM ran")
        until(lambda before=before: one(db, "SELECT count(*) FROM ran") > before + 10, 30)
        assert one(db, MOST_RELEASED) == 1
        victim = random.Random(seed).randrange(3)
        workers[victim].kill()
        workers[victim].wait()
        workers[victim] = start(database)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status <> 'COMPLETED'") == 0, 60)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.keyed") == 0, 10)
    assert one(db, "SELECT count(*) FROM ran WHERE NOT alone") == 0
    for key in range(KEYS):
        rows = db.execute("SELECT number FROM ran WHERE key = %s ORDER BY seq", [key]).fetchall()
        numbers = [row[0] for row in rows]
        assert numbers == sorted(numbers), "nothing overtakes, also where an attempt was lost and ran again"
        assert set(numbers) == set(range(EACH))
