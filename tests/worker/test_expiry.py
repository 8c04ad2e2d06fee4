"""`expires`: a command that has not started by then does not start. It ends CANCELED with the code EXPIRED."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from commandbus import (
    AuditEvent,
    CommandBus,
    CommandCanceledError,
    CommandStatus,
    HandlerRegistry,
    InvalidCommandError,
    RetryPolicy,
    TransientCommandError,
    TroubleshootingQueue,
    Worker,
)
from commandbus.worker import maintenance
from support.waiting import one, until, until_settled
from support.waiting import verdicts as numbered_verdicts
from support.workers import add

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def verdicts(db: Db, command_id: str) -> list[str]:
    return [verdict for _, verdict in numbered_verdicts(db, command_id)]


def make_late(db: Db, command_id: str) -> None:
    """Its moment has come, and passed."""
    db.execute(
        "UPDATE commandbus.command SET expires_at = now() - interval '1 ms' WHERE command_id = %s", [command_id]
    )


def status(bus: CommandBus, command_id: str) -> CommandStatus:
    found = bus.get_command("orders", command_id)
    assert found is not None
    return found.status


def test_a_command_that_expired_before_a_worker_came_is_canceled_with_a_reply(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    ran: list[str] = []

    async def note(command: Any, ctx: Any) -> None:
        ran.append(command.command_id)

    add(handlers, lane, "note", note)
    bus.create_queue("answers")
    bus.send("orders", "note", command_id="late", expires="10m", reply_to="answers")
    bus.send("orders", "note", command_id="in-time", expires="10m")
    make_late(db, "late")
    start_worker(handlers)
    until_settled(db)
    assert ran == ["in-time"]
    late = bus.get_command("orders", "late")
    assert late is not None
    assert (late.status, late.error_type, late.error_code) == (CommandStatus.CANCELED, "Expired", "EXPIRED")
    assert late.error == "it was not started before it expired"
    reply = one(db, "SELECT message FROM pgmq.q_answers")
    assert (reply["outcome"], reply["error"]["code"]) == ("CANCELED", "EXPIRED")
    assert verdicts(db, "late") == ["EXPIRED"]
    events = [entry.event for entry in bus.get_audit_trail("orders", "late")]
    assert events == [AuditEvent.SENT, AuditEvent.EXPIRED]
    in_time = bus.get_command("orders", "in-time")
    assert in_time is not None
    assert in_time.status is CommandStatus.COMPLETED
    assert in_time.expires_at is not None


def test_commands_that_no_worker_can_claim_expire_as_well(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """One is parked, one waits for its retry, one for a slot: the sweep ends all three."""

    @handlers.handler("orders", "paused")
    def paused(ctx: Any) -> None: ...

    @handlers.handler("orders", "fails", retry_policy=RetryPolicy(backoff_schedule=["1h"]))
    def fails(ctx: Any) -> None:
        raise TransientCommandError("later")

    @handlers.handler("orders", "waits")
    def waits(ctx: Any) -> None:
        go_on.wait(60)

    bus.pause("orders", "paused", operator="ada")
    sent = {name: bus.send("orders", name, command_id=name, expires="1h") for name in ("paused", "fails")}
    bus.send("orders", "waits", command_id="first")
    worker = start_worker(handlers, concurrency=1)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.parked") == 1)
    until(lambda: verdicts(db, "fails") == ["RETRY"])
    until(lambda: status(bus, "first") is CommandStatus.IN_PROGRESS)
    bus.send("orders", "waits", command_id="second", expires="1h")
    for command_id in (*sent, "second"):
        make_late(db, command_id)
    until(lambda: {status(bus, name) for name in (*sent, "second")} == {CommandStatus.CANCELED})
    assert verdicts(db, "paused") == ["PARKED", "EXPIRED"]
    assert verdicts(db, "fails") == ["RETRY", "EXPIRED"]
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 1
    go_on.set()
    until_settled(db)
    assert worker.stop().unwritten == 0
    assert bus.get_command("orders", "fails").error_code == "EXPIRED"  # type: ignore[union-attr]


def late(bus: CommandBus, db: Db, *ids: str) -> None:
    """Commands that nobody claims, and that have expired."""
    for command_id in ids:
        bus.send("orders", "note", command_id=command_id, delay="1h")
        make_late(db, command_id)


def test_a_locked_command_keeps_no_other_from_expiring(
    database: str, bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "note", lambda ctx: None)
    late(bus, db, "a", "b")
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM commandbus.command WHERE command_id = 'a' FOR UPDATE")
        start_worker(handlers)
        until(lambda: status(bus, "b") is CommandStatus.CANCELED)
        assert status(bus, "a") is CommandStatus.PENDING
    until(lambda: status(bus, "a") is CommandStatus.CANCELED)


def test_what_waits_in_vain_for_a_lock_is_not_forgotten(
    database: str,
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(maintenance, "LOCKED_SECONDS", 0.5)
    handlers.register("orders", "note", lambda ctx: None)
    late(bus, db, "a")
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE commandbus.parked IN SHARE MODE")
        start_worker(handlers)
        until(lambda: "maintenance (expiry) needs a row that somebody has locked" in caplog.text)
        assert status(bus, "a") is CommandStatus.PENDING
    until(lambda: status(bus, "a") is CommandStatus.CANCELED)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_an_attempt_that_runs_when_its_command_expires_goes_on(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """But after it has failed, no further attempt starts."""

    @handlers.handler("orders", "completes")
    def completes(ctx: Any) -> None:
        go_on.wait(60)

    @handlers.handler("orders", "fails", retry_policy=RetryPolicy(backoff_schedule=["1h"]))
    def fails(ctx: Any) -> None:
        go_on.wait(60)
        raise TransientCommandError("later")

    for name in ("completes", "fails"):
        bus.send("orders", name, command_id=name, expires="1h")
    start_worker(handlers)
    until(lambda: {status(bus, name) for name in ("completes", "fails")} == {CommandStatus.IN_PROGRESS})
    for name in ("completes", "fails"):
        make_late(db, name)
    bus.send("orders", "completes", command_id="sentinel", delay="1h", expires="2h")
    make_late(db, "sentinel")  # when this one is gone, the sweep has met the others
    until(lambda: status(bus, "sentinel") is CommandStatus.CANCELED)
    assert {status(bus, name) for name in ("completes", "fails")} == {CommandStatus.IN_PROGRESS}
    go_on.set()
    until_settled(db)
    assert status(bus, "completes") is CommandStatus.COMPLETED
    assert verdicts(db, "fails") == ["RETRY", "EXPIRED"]


def test_members_of_batches_and_calls_hear_of_it(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "note")
    def note(ctx: Any) -> None: ...

    bus.create_queue("ends")
    bus.create_batch(
        "orders",
        [{"command_type": "note", "command_id": "a", "expires": "1h", "delay": "30m"}, {"command_type": "note"}],
        batch_id="b",
        on_complete={"reply_to": "ends"},
    )
    make_late(db, "a")
    start_worker(handlers)
    batch = bus.wait_for_batch("orders", "b", wait=30)
    assert (batch.completed, batch.canceled, batch.status) == (1, 1, "COMPLETED_WITH_FAILURES")
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_ends") == 1)
    bus.pause("orders", "note", operator="ada")
    with pytest.raises(CommandCanceledError, match="not started before it expired"):
        bus.call("orders", "note", expires=0.2, wait=30)


def test_an_operators_retry_does_not_expire(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    ends = [TransientCommandError("once"), None]

    @handlers.handler("orders", "fails", retry_policy=RetryPolicy(max_attempts=1))
    def fails(ctx: Any) -> None:
        if (error := ends.pop(0)) is not None:
            raise error

    bus.send("orders", "fails", command_id="c", expires="1h")
    start_worker(handlers)
    until(lambda: status(bus, "c") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    make_late(db, "c")
    TroubleshootingQueue(bus).operator_retry("orders", "c", operator="ada")
    until_settled(db)
    assert status(bus, "c") is CommandStatus.COMPLETED


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expires": "soon"}, "expires: 'soon' is not a duration"),
        ({"expires": -1}, "expires: -1 is negative"),
        ({"expires": 0}, "expires must be longer than 0"),
        ({"expires": datetime(2030, 1, 1)}, "expires must be a datetime with a time zone"),  # noqa: DTZ001
        ({"expires": "5m", "delay": "10m"}, "expires .'5m'. must be longer than delay .'10m'."),
        (
            {"expires": datetime(2030, 1, 1, tzinfo=UTC), "at": datetime(2030, 1, 1, tzinfo=UTC)},
            "must be later than at",
        ),
        ({"on_exhausted": "explode"}, 'on_exhausted must be "troubleshoot" or "fail", not \'explode\''),
    ],
)
def test_bad_input_is_refused(bus: CommandBus, db: Db, options: Any, text: str) -> None:
    with pytest.raises(InvalidCommandError, match=text):
        bus.send("orders", "note", **options)
    with pytest.raises(InvalidCommandError, match=text):
        bus.send_many("orders", [{"command_type": "note", **options}])
    assert one(db, "SELECT count(*) FROM commandbus.command") == 0


def test_a_moment_in_the_past_expires_at_once(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "note")
    def note(ctx: Any) -> None: ...

    bus.send("orders", "note", command_id="c", expires=datetime.now(UTC) - timedelta(hours=1))
    start_worker(handlers)
    until_settled(db)
    assert status(bus, "c") is CommandStatus.CANCELED
