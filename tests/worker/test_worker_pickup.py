"""Pickup: an idle worker hears of work at once, however seldom it polls."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandStatus, HandlerRegistry, NewCommand, Worker
from commandbus.worker import claimer
from support.waiting import Stopwatch, one, statuses, until, until_settled

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
SELDOM = {"poll_interval": 60.0}
SOON = 5.0  # far below the poll, far above what a busy machine needs


@pytest.fixture
def handlers() -> HandlerRegistry:
    """One quick handler."""
    handlers = HandlerRegistry()
    handlers.register("orders", "work", lambda ctx: None)
    return handlers


def until_waiting(db: Db) -> None:
    """Until the worker has announced that it waits for notifications, and sleeps."""
    until(lambda: one(db, "SELECT count(*) FROM commandbus.waiting WHERE expires_at > now()"))
    until(
        lambda: one(
            db,
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle' "
            "AND application_name LIKE '%%claimer' AND state_change < now() - interval '0.2 s' AND %s",
            True,
        )
    )


def test_a_send_is_heard(bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker) -> None:
    start_worker(handlers, **SELDOM)
    until_waiting(db)
    for _ in range(3):
        bus.send("orders", "work")
        until_settled(db, SOON)
    assert statuses(db) == {"COMPLETED": 3}


def test_a_resumed_domain_is_heard(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """Nothing was parked: the worker has claimed nothing while the domain was paused."""
    bus.pause("orders", operator="ann")
    bus.send_many("orders", [NewCommand("work") for _ in range(50)])
    start_worker(handlers, **SELDOM)
    until_waiting(db)
    bus.resume("orders", operator="ann")
    until_settled(db, SOON)
    assert statuses(db) == {"COMPLETED": 50}


def test_send_many_is_heard(bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker) -> None:
    start_worker(handlers, **SELDOM)
    until_waiting(db)
    bus.send_many("orders", [NewCommand("work") for _ in range(50)])
    until_settled(db, SOON)
    assert statuses(db) == {"COMPLETED": 50}


def test_a_send_is_heard_when_its_transaction_commits(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """Its vt is older than what the claimer has seen since: the notification takes the cursor back."""
    start_worker(handlers, **SELDOM)
    until_waiting(db)
    with psycopg.connect(database) as sender:
        bus.send("orders", "work", command_id="late", conn=sender)
        bus.send("orders", "work", command_id="meanwhile")
        until(lambda: bus.get_command("orders", "meanwhile").status is CommandStatus.COMPLETED)  # type: ignore[union-attr]
        until_waiting(db)
        sender.commit()
    until_settled(db, SOON)
    assert one(db, "SELECT count(*) FROM commandbus.command") == 2


def test_a_worker_that_withdrew_its_announcement_while_busy_announces_again(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer, "BUSY_SECONDS", 0.0)  # a fast worker is done with its commands at once
    start_worker(handlers, **SELDOM)
    until_waiting(db)

    def is_withdrawn() -> bool:
        bus.send_many("orders", [NewCommand("work") for _ in range(1500)])
        return bool(one(db, "SELECT count(*) = 0 FROM commandbus.waiting"))

    until(is_withdrawn)
    until_settled(db)
    until_waiting(db)
    bus.send("orders", "work")
    until_settled(db, SOON)
    assert set(statuses(db)) == {"COMPLETED"}


def test_the_announcement_is_renewed_before_it_expires(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer, "ANNOUNCEMENT_SECONDS", 1.0)
    start_worker(handlers, **SELDOM)
    until_waiting(db)
    first = one(db, "SELECT expires_at FROM commandbus.waiting")
    until(lambda: one(db, "SELECT now() > %s + interval '0.5 s'", first))
    assert one(db, "SELECT expires_at > now() FROM commandbus.waiting")
    bus.send("orders", "work")
    until_settled(db, SOON)


def test_a_stopped_worker_leaves_no_announcement(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    worker = start_worker(handlers, **SELDOM)
    until_waiting(db)
    stopwatch = Stopwatch()
    worker.stop()
    assert stopwatch.seconds() < SOON
    assert one(db, "SELECT count(*) FROM commandbus.waiting") == 0


def test_a_delayed_command_runs_when_it_is_due(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    start_worker(handlers, **SELDOM)
    until_waiting(db)
    bus.send("orders", "work", command_id="later", delay=1.2)
    bus.send("orders", "work", command_id="sooner", delay=timedelta(seconds=0.6))
    bus.send("orders", "work", command_id="at", at=datetime.now(UTC) + timedelta(seconds=0.3))
    until_settled(db, 1.2 + SOON)
    for command_id, delay in (("later", 1.2), ("sooner", 0.6), ("at", 0.3)):
        found = bus.get_command("orders", command_id)
        assert found is not None
        assert found.started_at is not None
        waited = (found.started_at - found.created_at).total_seconds()
        assert delay - 0.1 <= waited < delay + 1.0, command_id


def test_listening_goes_on_after_the_connection_was_lost(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    start_worker(handlers, **SELDOM)
    until_waiting(db)
    pid = one(
        db,
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name LIKE '%%claimer' AND %s",
        True,
    )
    assert one(db, "SELECT pg_terminate_backend(%s, 5000)", pid)
    until(
        lambda: one(
            db,
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> %s "
            "AND application_name LIKE '%%claimer'",
            pid,
        )
    )
    until_waiting(db)
    bus.send("orders", "work")
    until_settled(db, SOON)


def test_a_worker_without_notifications_polls(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """A raw PGMQ client notifies nobody."""
    start_worker(handlers, poll_interval=0.3)
    until_waiting(db)
    db.execute("""SELECT pgmq.send('orders__commands', '{"command_type": "work"}')""")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 1, SOON)
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0
