"""kill -9 of routers and workers under many sagas that wait for signals, sleep and nest others: the ledger
balances."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, InvalidOperationError, TroubleshootingQueue
from support.running import examples
from support.saga_worker import LEDGER, UNDONE_BY, fate, order
from support.waiting import one, until

SAGAS = 150
KILLS = 9
EARLY = 90  # so many sagas get their signal before they wait for it
STRIDE = 50  # entries of the ledger between two kills
CANCELS = 2  # processes that somebody tries to cancel after each kill
KINDS = ("steps", "router", "all")
Db = psycopg.Connection[Any]
Process = subprocess.Popen[bytes]


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        for domain in ("orders", "processes"):
            bus.create_domain(domain)
        yield bus


@pytest.fixture
def ledger() -> str:
    return LEDGER


@pytest.fixture
def start_worker(database: str) -> Iterator[Callable[[str], Process]]:
    """Starts worker processes of `support/saga_worker.py`; none outlives the test."""
    started: list[Process] = []
    tests = Path(__file__).parents[1]
    settings = {
        "database_url": database,
        "concurrency": 4,
        "poll_interval": 0.2,
        "visibility_timeout": 1.5,
        "statement_timeout": 1.0,
        "cancel_grace": 0.5,
        "max_attempts": 50,
    }

    def start(kind: str) -> Process:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.saga_worker", kind, json.dumps(settings)],
            env=os.environ | {"PYTHONPATH": f"{tests.parent / 'src'}:{tests}"},
            stdin=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + examples(1, thorough=3)))
def test_the_ledger_balances_whoever_is_killed(
    bus: CommandBus, db: Db, start_worker: Callable[[str], Process], seed: int
) -> None:
    chance = random.Random(seed)
    names = [f"{seed}-{n}" for n in range(SAGAS)]
    bus.create_process_batch(order, [{"process_id": name, "data": {}} for name in names], batch_id="all")
    alive = [(kind, start_worker(kind)) for kind in KINDS]
    _signal(bus, names[:EARLY])
    for reached in range(40, 40 + STRIDE * KILLS, STRIDE):
        until(lambda reached=reached: _progress(db, bus) >= reached, 60, what=lambda: _look(db))
        kind, victim = alive.pop(chance.randrange(len(alive)))
        victim.kill()
        alive.append((kind, start_worker(kind)))
        for name in chance.sample(names, CANCELS):
            _cancel(bus, name)
        _signal(bus, names[: EARLY + reached // 4])
    _signal(bus, names)
    until(lambda: _progress(db, bus) and _is_over(db), 60, what=lambda: _look(db))
    assert all(process.poll() is None for _, process in alive), "no worker died of itself"
    _check(bus, db, names)


def _progress(db: Db, bus: CommandBus) -> int:
    """How much is written in the ledger; and somebody looks after the troubleshooting queue."""
    for domain in ("orders", "processes"):
        TroubleshootingQueue(bus).retry_all(domain, operator="ann")
    count: int = one(db, "SELECT count(*) FROM ledger")
    return count


def _signal(bus: CommandBus, names: list[str]) -> None:
    """Those that got it already get it again: it is the same signal."""
    for name in names:
        with suppress(InvalidOperationError):  # it has ended, or is being undone
            bus.signal("processes", name, "ok", {"n": name}, signal_id="only")


def _cancel(bus: CommandBus, name: str) -> None:
    try:
        bus.cancel_process("processes", name, operator="bob")
    except InvalidOperationError:
        return  # it has ended, or is being undone


def _is_over(db: Db) -> bool:
    return bool(
        one(
            db,
            "SELECT NOT EXISTS (SELECT FROM commandbus.process WHERE finished_at IS NULL) "
            "AND NOT EXISTS (SELECT FROM commandbus.command "
            "WHERE status NOT IN ('COMPLETED', 'FAILED', 'CANCELED'))",
        )
    )


def _look(db: Db) -> list[Any]:
    return db.execute("SELECT status, count(*) FROM commandbus.process GROUP BY 1").fetchall()


def _check(bus: CommandBus, db: Db, names: list[str]) -> None:
    entries: dict[str, list[str]] = {name: [] for name in names}
    for name, entry in db.execute("SELECT process_id, entry FROM ledger ORDER BY id"):
        entries[name].append(entry)
    states: dict[str, str] = dict(
        db.execute("SELECT process_id, status FROM commandbus.process WHERE parent IS NULL").fetchall()
    )
    assert set(states) == set(names)
    for name in names:
        _check_one(name, states[name], entries[name])
    found = Counter(states.values())
    assert set(found) == {"COMPLETED", "COMPENSATED", "FAILED", "CANCELED"}
    # The sums: only what was completed is off the shelf.
    sums = dict(db.execute("SELECT account, sum(amount)::integer FROM ledger GROUP BY 1").fetchall())
    n = found["COMPLETED"]
    assert sums == {"stock": -n, "money": -7 * n, "labels": -n, "parcels": -n}
    # Every process that went on took its one signal, once; and a nested process ended as its parent did.
    assert one(db, "SELECT count(command) - count(DISTINCT command) FROM commandbus.process_step") == 0
    ends = db.execute(
        "SELECT DISTINCT p.status, n.status FROM commandbus.process n JOIN commandbus.process p ON p.id = n.parent"
    ).fetchall()
    undone = {"COMPENSATED", "CANCELED", "FAILED"}
    assert all(inner == "COMPLETED" if outer == "COMPLETED" else inner in undone for outer, inner in ends), ends
    # The trail says the same.
    done = one(db, "SELECT count(*) FROM commandbus.process_step WHERE status = 'COMPLETED' AND kind IS NULL")
    assert done == sum(len(found) for found in entries.values())
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'LOST'") > 0, (
        "somebody was killed at work"
    )
    batch = bus.wait_for_batch("processes", "all", wait="20 s")
    assert batch.status == "COMPLETED_WITH_FAILURES"
    assert (batch.total, batch.completed, batch.failed, batch.canceled, batch.in_tsq) == (
        SAGAS, n, found["COMPENSATED"] + found["FAILED"], found["CANCELED"], 0,
    )  # fmt: skip


def _check_one(name: str, status: str, entries: list[str]) -> None:
    what = f"{name} is {status}: {entries}"
    assert len(entries) == len(set(entries)), what
    done = [entry for entry in entries if entry in UNDONE_BY]
    undone = [entry for entry in entries if entry in UNDONE_BY.values()]
    assert not any(fate(name, entry) == "refused" for entry in done), what
    if status == "COMPLETED":
        assert sorted(entries) == ["charge", "label", "reserve", "ship"], what
        assert (entries[0], entries[-1]) == ("reserve", "ship"), what
        return
    assert "ship" not in entries or status == "CANCELED", what  # the request came when it was on its way
    if status == "FAILED":
        assert entries == [], what
    assert undone == [UNDONE_BY[entry] for entry in reversed(done)] or _is_raced(done, undone), what


def _is_raced(done: list[str], undone: list[str]) -> bool:
    """Of two steps at once the ledger and the router may have heard in another order."""
    done[1:3] = reversed(done[1:3])
    return done[:1] == ["reserve"] and undone == [UNDONE_BY[entry] for entry in reversed(done)]
