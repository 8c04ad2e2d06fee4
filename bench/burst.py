"""A burst on an idle worker: its sessions have planned their statements while the tables were nearly empty.

Each figure has a database of its own. A burst is committed at once; its rate counts from the commit to the last
settlement. Beside it stands the rate of the same worker on a queue that was filled and analyzed before it began.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from bench.fleet import Member, drain
from bench.ground import DATA, Ground
from commandbus import SentCommand

DOMAIN = "burst"
TRICKLE = 20
TRICKLE_SECONDS = 3.0
HISTORY = 150_000


def measure(base: Ground, count: int, *, history: int = 0) -> tuple[float, float]:
    """Commands a second of a burst after idleness, and of a queue that was filled before; `history` is how many
    finished and analyzed commands there are."""
    return _after_idleness(base, count, history), _filled_before(base, count, history)


def _after_idleness(base: Ground, count: int, history: int) -> float:
    with _database(base, "burst_idle", history) as own, _member(own) as member:
        own.bus.resume(DOMAIN)
        with _trickle(own) as sent:
            time.sleep(TRICKLE_SECONDS)
            own.insert(DOMAIN, count)
            started = time.perf_counter()
            own.admin.execute("SELECT pg_notify(%s, '0')", (f"commandbus_{DOMAIN}",))
        while member.read()[0] < count + len(sent):
            time.sleep(0.001)
            if time.perf_counter() - started > 600:
                raise RuntimeError("the burst did not drain within ten minutes")
        return count / (time.perf_counter() - started)


@contextmanager
def _trickle(own: Ground) -> Iterator[list[SentCommand]]:
    """Single commands, up to the moment of the burst: the worker has made plans an instant ago."""
    ended = threading.Event()
    sent: list[SentCommand] = []

    def send() -> None:
        while not ended.wait(TRICKLE_SECONDS / TRICKLE):
            sent.append(own.bus.send(DOMAIN, "work", DATA))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        ended.set()
        thread.join()


def _filled_before(base: Ground, count: int, history: int) -> float:
    with _database(base, "burst_filled", history) as own, _member(own) as member:
        own.fill(DOMAIN, count)
        return drain(own, DOMAIN, [member], count)


@contextmanager
def _database(base: Ground, name: str, history: int) -> Iterator[Ground]:
    base.admin.execute(f"CREATE DATABASE {name}".encode())
    parts = psycopg.conninfo.conninfo_to_dict(base.url)
    own = Ground(psycopg.conninfo.make_conninfo(**{**parts, "dbname": name}))
    try:
        own.domain(DOMAIN)
        if history:
            own.admin.execute(
                "INSERT INTO commandbus.command (domain, command_id, command_type, status, data, finished_at) "
                "SELECT %s, 'old-' || n, 'work', 'COMPLETED', %s, now() FROM generate_series(1, %s) n",
                (DOMAIN, json.dumps(DATA), history),
            )
            own.settle_down(DOMAIN)
        yield own
    finally:
        own.close()
        base.admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@contextmanager
def _member(own: Ground) -> Iterator[Member]:
    member = Member(own, DOMAIN, "sync")
    try:
        yield member
    finally:
        member.close()
