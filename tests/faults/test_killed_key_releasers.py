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
PLACES = 3
PROGRAM = """
import sys; sys.path[:0] = {paths!r}
import time
from commandbus import HandlerRegistry, Limit, Worker
from support.workers import quick_settings, short_lease
handlers = HandlerRegistry()
def run(command, ctx, kind, places):
    key, number = command.data
    with ctx.connection() as conn:  # a lock of the session stands for a place: it ends with a killed worker
        free = "SELECT n FROM generate_series(1, %s) n WHERE pg_try_advisory_lock(77, %s + n) LIMIT 1"
        place = conn.execute(free, [places, key * 10]).fetchone()
        time.sleep(0.01)
        ran = [kind, key, number, place is not None]
        conn.execute("INSERT INTO ran (kind, key, number, has_place) VALUES (%s, %s, %s, %s)", ran)
        if place is not None:
            conn.execute("SELECT pg_advisory_unlock(77, %s)", [key * 10 + place[0]])
account = Limit("account", concurrency=1, ordered=True, key="data.0")
tenant = Limit("tenant", concurrency={places}, key="data.0")
handlers.register("orders", "book", lambda command, ctx: run(command, ctx, "book", 1), limits=[account])
handlers.register("orders", "ship", lambda command, ctx: run(command, ctx, "ship", {places}), limits=[tenant])
Worker(handlers, settings=quick_settings({url!r}, **short_lease())).run()
"""
MOST_RELEASED = """
SELECT key_limit, max(n) FROM (
    SELECT k.key_limit, count(*) AS n FROM commandbus.keyed k JOIN commandbus.command c ON c.id = k.command
     WHERE k.state = 'RELEASED' AND c.status = 'PENDING' GROUP BY k.key_limit, k.key) counted
 GROUP BY 1
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    """Starts worker processes; none outlives the test."""
    started: list[Process] = []

    def start(url: str) -> Process:
        paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
        started.append(
            subprocess.Popen([sys.executable, "-c", PROGRAM.format(paths=paths, url=url, places=PLACES)])
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_workers_are_killed_again_and_again(
    start: Callable[[str], Process], database: str, bus: CommandBus, db: Db
) -> None:
    db.execute("CREATE TABLE ran (seq bigserial, kind text, key integer, number integer, has_place boolean)")
    workers = [start(database) for _ in range(3)]
    until(lambda: one(db, "SELECT count(*) FROM commandbus.type_rule") == 2, 30)
    bus.send_many(
        "orders",
        [
            NewCommand(kind, [key if kind == "book" else key + KEYS, number], max_attempts=100)
            for number in range(EACH)
            for key in range(KEYS)
            for kind in ("book", "ship")
        ],
    )
    for seed in range(5):
        before = one(db, "SELECT count(*) FROM ran")
        until(lambda before=before: one(db, "SELECT count(*) FROM ran") > before + 15, 30)
        released = dict(db.execute(MOST_RELEASED).fetchall())
        assert released.get("account", 1) == 1
        assert released.get("tenant", 1) <= PLACES
        for victim in random.Random(seed).sample(range(3), 3 if seed == 3 else 1):
            workers[victim].kill()
            workers[victim].wait()
            workers[victim] = start(database)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status <> 'COMPLETED'") == 0, 60)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.keyed") == 0, 10)
    assert one(db, "SELECT count(*) FROM ran WHERE NOT has_place") == 0
    for key in range(KEYS):
        rows = db.execute("SELECT number FROM ran WHERE kind = 'book' AND key = %s ORDER BY seq", [key]).fetchall()
        numbers = [row[0] for row in rows]
        assert numbers == sorted(numbers), "nothing overtakes, also where an attempt was lost and ran again"
        assert set(numbers) == set(range(EACH))
    assert one(db, "SELECT count(DISTINCT (key, number)) FROM ran WHERE kind = 'ship'") == KEYS * EACH
