"""What the coroner tells breakers: only culprits count, and a probe that killed its worker went badly."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, Settings
from commandbus.db.drivers import run
from commandbus.flow.breakers.breaker import advance
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.commands.rescue import Rule
from commandbus.model.breaker import Breaker
from commandbus.model.crash_attribution import Cause, Death
from commandbus.model.retry import RetryPolicy
from commandbus.supervisor.coroner import Case, Coroner
from commandbus.supervisor.worker_messages import Hello
from commandbus.worker.board import SlotView
from support.waiting import one, until, verdicts

Db = psycopg.Connection[Any]
AT_ONCE = Rule(RetryPolicy(3, (0.0,), 0.0))
EXITED = Death(Cause.EXITED, exit_code=1)
TWO = {"orders/ship": Breaker(stuck=2, reset="1h")}


@pytest.fixture
def settings(database: str) -> Settings:
    return Settings(database_url=database, breakers=TWO)


@pytest.fixture
def coroner(settings: Settings, bus: CommandBus) -> Iterator[Coroner]:
    coroner = Coroner(settings, "test")
    coroner.start()
    yield coroner
    coroner.stop(5)


def die(coroner: Coroner, settings: Settings, db: Db, worker: str, ran: int, death: Death = EXITED) -> None:
    """A worker claims, runs so many of what it got, dies, and is examined."""
    found = run(db, claim(domain="orders", worker=worker, n=10, lease_seconds=30, cursor=None))
    rows = list(found.ready)
    if found.odd:
        rows += run(db, put_right(domain="orders", worker=worker, odd=found.odd, max_bytes=1000))[0]
    slots = [
        SlotView(index, 0, row[0], row[1], time.monotonic(), math.inf, 100 + index, index, 0)
        for index, row in enumerate(rows[:ran])
    ]
    hello = Hello(worker, ["orders"], {}, AT_ONCE)
    coroner.add(Case(hello, death, slots, time.monotonic(), settings))
    until(lambda: not coroner.open_cases, what="the case is not done")


def test_culprits_count_and_open_it(
    coroner: Coroner, settings: Settings, bus: CommandBus, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    bus.send("orders", "ship", command_id="a")
    die(coroner, settings, db, "w1", 1)
    assert [(info.state, info.stuck) for info in bus.breakers()] == [("CLOSED", 1)]
    bus.cancel("orders", "a")
    bus.send("orders", "ship", command_id="b")
    die(coroner, settings, db, "w2", 1)
    (info,) = bus.breakers()
    assert (info.state, info.stuck) == ("OPEN", 2)
    assert info.reason is not None
    assert re.match(
        r"2 of 2 attempts stuck since .* UTC \(2 commands\), the last: WorkerLost: the worker process ended with",
        info.reason,
    )
    assert any("the breaker of orders/ship is open" in line for line in caplog.messages)


def test_one_command_that_kills_every_worker_is_no_trouble_of_its_type(
    coroner: Coroner, settings: Settings, bus: CommandBus, db: Db
) -> None:
    bus.send("orders", "ship", command_id="a")
    for worker in ("w1", "w2", "w3"):
        die(coroner, settings, db, worker, 1)
    assert [(info.state, info.stuck) for info in bus.breakers()] == [("CLOSED", 3)]


def test_suspects_bystanders_and_those_that_did_not_run_do_not_count(
    coroner: Coroner, settings: Settings, bus: CommandBus, db: Db
) -> None:
    for n in range(3):
        bus.send("orders", "ship", command_id=f"c{n}")
    die(coroner, settings, db, "w1", 2)
    die(coroner, settings, db, "w2", 3, Death(Cause.STOPPED, reason="reloaded"))
    assert [verdict for n in range(3) for _, verdict in verdicts(db, f"c{n}")].count("RETRY") == 0
    assert bus.breakers().items == []


def test_one_that_was_to_be_canceled_does_not_count(
    coroner: Coroner, settings: Settings, bus: CommandBus, db: Db
) -> None:
    bus.send("orders", "ship", command_id="a")
    found = run(db, claim(domain="orders", worker="w1", n=1, lease_seconds=30, cursor=None))
    bus.cancel("orders", "a")
    slot = SlotView(0, 0, found.ready[0][0], 1, time.monotonic(), math.inf, 100, 0, 0)
    coroner.add(Case(Hello("w1", ["orders"], {}, AT_ONCE), EXITED, [slot], time.monotonic(), settings))
    until(lambda: not coroner.open_cases)
    assert verdicts(db, "a") == [(1, "CANCELED")]
    assert bus.breakers().items == []


def test_a_probe_that_killed_its_worker_opens_it_again(
    coroner: Coroner, settings: Settings, bus: CommandBus, db: Db
) -> None:
    bus.open_breaker("orders", "ship", operator="ann")
    bus.send("orders", "ship", command_id="a")
    die(coroner, settings, db, "parker", 0)
    db.execute("UPDATE commandbus.breaker SET is_forced = false, until = now()")
    moved = bus.run(advance("orders", "ship"))
    assert moved is not None
    assert moved.state == "HALF_OPEN"
    die(coroner, settings, db, "w1", 1)
    (info,) = bus.breakers()
    assert info.state == "OPEN"
    assert (info.reason or "").startswith("its probe got stuck: WorkerLost")


def test_word_waits_for_the_database(coroner: Coroner, settings: Settings, bus: CommandBus, db: Db) -> None:
    """The coroner is thrown off the server after it has settled and before it could tell."""
    bus.send("orders", "ship", command_id="a")
    with psycopg.connect(settings.database_url or "") as blocker:
        blocker.execute("LOCK TABLE commandbus.breaker IN EXCLUSIVE MODE")  # claims read it still
        found = run(db, claim(domain="orders", worker="w1", n=1, lease_seconds=30, cursor=None))
        slot = SlotView(0, 0, found.ready[0][0], 1, time.monotonic(), math.inf, 100, 0, 0)
        coroner.add(Case(Hello("w1", ["orders"], {}, AT_ONCE), EXITED, [slot], time.monotonic(), settings))
        waiting = (
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'commandbus test coroner' "
            "AND datname = current_database() AND wait_event_type = 'Lock'"
        )
        until(lambda: db.execute(waiting).fetchone())
        assert verdicts(db, "a") == [(1, "RETRY")]
        assert one(db, f"SELECT pg_terminate_backend(({waiting}))")
    until(lambda: [info.stuck for info in bus.breakers()] == [1])
