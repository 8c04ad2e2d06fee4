"""Snooze, retries by exception, and what happens when the attempts are used up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AuditEvent,
    CommandBus,
    CommandFailedError,
    CommandRecord,
    CommandStatus,
    HandlerRegistry,
    PermanentCommandError,
    RetryPolicy,
    Saga,
    Snooze,
    TransientCommandError,
    TroubleshootingQueue,
    Worker,
    step,
)
from commandbus.flow.commands.history import AttemptRecord, list_attempts
from support.waiting import one, until, until_settled
from support.waiting import verdicts as numbered_verdicts
from support.workers import AT_ONCE, add

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
FAILS = RetryPolicy(max_attempts=2, backoff_schedule=[0], on_exhausted="fail")


def verdicts(db: Db, command_id: str) -> list[str]:
    return [verdict for _, verdict in numbered_verdicts(db, command_id)]


def record(bus: CommandBus, command_id: str) -> CommandRecord:
    found = bus.get_command("orders", command_id)
    assert found is not None
    return found


def attempts(bus: CommandBus, command_id: str) -> list[AttemptRecord]:
    return bus.run(list_attempts("orders", command_id))


# --- snooze ---------------------------------------------------------------------------------------------------


def test_a_snoozed_command_is_tried_again_and_not_charged(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[tuple[int, int]] = []

    async def ship(command: Any, ctx: Any) -> Any:
        seen.append((ctx.attempt, ctx.attempt_number))
        if len(seen) == 1:
            raise Snooze(0.05, "the label is not printed")
        if len(seen) == 2:
            ctx.snooze("50ms", "still not")
        return "shipped"

    add(handlers, lane, "ship", ship, retry_policy=RetryPolicy(max_attempts=1))
    bus.send("orders", "ship", command_id="c")
    worker = start_worker(handlers)
    until_settled(db)
    done = record(bus, "c")
    assert (done.status, done.result, done.charged_attempts, done.snoozes) == (
        CommandStatus.COMPLETED, "shipped", 1, 2,
    )  # fmt: skip
    assert seen == [(1, 1), (1, 2), (1, 3)]
    first, second = attempts(bus, "c")
    assert (first.verdict, first.error_code, first.error) == ("SNOOZED", "SNOOZED", "the label is not printed")
    assert second.error == "still not"
    assert first.retry_at is not None
    assert first.retry_at > first.finished_at
    assert AuditEvent.SNOOZED in [entry.event for entry in bus.get_audit_trail("orders", "c")]
    assert worker.health_status.consecutive_failures == 0


def test_too_many_snoozes_use_the_attempts_up(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "often", retry_policy=RetryPolicy(max_snoozes=2))
    def often(ctx: Any) -> None:
        raise Snooze(0, "not yet")

    @handlers.handler("orders", "long", retry_policy=RetryPolicy(max_snooze_time="1h", on_exhausted="fail"))
    def long(ctx: Any) -> None:
        raise Snooze("2h")

    for name in ("often", "long"):
        bus.send("orders", name, command_id=name)
    start_worker(handlers)
    until_settled(db)
    assert verdicts(db, "often") == ["SNOOZED", "SNOOZED", "EXHAUSTED"]
    given_up = record(bus, "often")
    assert (given_up.status, given_up.error_code) == (CommandStatus.IN_TROUBLESHOOTING_QUEUE, "SNOOZED_TOO_OFTEN")
    assert given_up.error is not None
    assert "max_snoozes 2" in given_up.error
    assert "not yet" in given_up.error
    assert (record(bus, "long").status, verdicts(db, "long")) == (CommandStatus.FAILED, ["FAILED"])
    TroubleshootingQueue(bus).operator_retry("orders", "often", operator="ada")
    until(lambda: len(verdicts(db, "often")) == 6)
    assert verdicts(db, "often")[3:] == ["SNOOZED", "SNOOZED", "EXHAUSTED"]  # counted anew


def test_a_snooze_rolls_its_transaction_back(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    db.execute("CREATE TABLE shipment (n int)")
    delays = [0.01]

    @handlers.handler("orders", "ship")
    def ship(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute("INSERT INTO shipment VALUES (1)")
            if delays:
                ctx.snooze(delays.pop())

    bus.send("orders", "ship", command_id="c")
    start_worker(handlers)
    until_settled(db)
    assert one(db, "SELECT count(*) FROM shipment") == 1
    assert verdicts(db, "c") == ["SNOOZED"]


def test_a_bad_delay_is_the_handlers_own_error(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "bad", retry_policy=RetryPolicy(max_attempts=1))
    def bad(ctx: Any) -> None:
        ctx.snooze("tomorrow")

    bus.send("orders", "bad", command_id="c")
    start_worker(handlers)
    until_settled(db)
    assert record(bus, "c").error_type == "ValueError"
    assert "'tomorrow' is not a duration" in (record(bus, "c").error or "")


# --- retries by exception -------------------------------------------------------------------------------------


class BusyError(Exception):
    def __init__(self, seconds: Any) -> None:
        super().__init__(f"busy for {seconds}")
        self.seconds = seconds


def test_the_policy_looks_at_the_exception(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    raised = {"retried": ConnectionError("a"), "other": KeyError("b"), "hopeless": ConnectionRefusedError("c")}
    policy = RetryPolicy(
        max_attempts=2, backoff_schedule=[0], retry_on=[ConnectionError], give_up_on=ConnectionRefusedError
    )

    async def fail(command: Any, ctx: Any) -> None:
        raise raised[command.command_id]

    add(handlers, lane, "fail", fail, retry_policy=policy)
    for name in raised:
        bus.send("orders", "fail", command_id=name)
    start_worker(handlers)
    until_settled(db)
    assert {name: verdicts(db, name) for name in raised} == {
        "retried": ["RETRY", "EXHAUSTED"],
        "other": ["EXHAUSTED"],
        "hopeless": ["EXHAUSTED"],
    }


def test_the_exception_says_the_delay(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    delays = {"own": 1800, "schedule": None, "broken": "nonsense"}
    policy = RetryPolicy(
        max_attempts=2,
        backoff_schedule=["20m"],
        jitter=0,
        delay_from=lambda error: getattr(error, "seconds", None),
    )

    @handlers.handler("orders", "fail", retry_policy=policy)
    def fail(command: Any, ctx: Any) -> None:
        raise BusyError(delays[command.command_id])

    for name in delays:
        bus.send("orders", "fail", command_id=name)
    with caplog.at_level(logging.ERROR):
        start_worker(handlers)
        until(lambda: [verdicts(db, name) for name in delays] == [["RETRY"]] * 3)
    waits = {}
    for name in delays:
        (attempt,) = attempts(bus, name)
        assert attempt.retry_at is not None
        waits[name] = round((attempt.retry_at - attempt.finished_at).total_seconds())
    assert waits == {"own": 1800, "schedule": 1200, "broken": 1200}
    assert "delay_from failed (ValueError: delay_from: 'nonsense' is not a duration" in caplog.text


# --- on_exhausted ---------------------------------------------------------------------------------------------


def test_who_says_what_happens_when_the_attempts_are_used_up(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ctx: Any) -> None:
        raise TransientCommandError("no")

    handlers.register("orders", "policy", fail, retry_policy=FAILS)
    handlers.register("orders", "handler", fail, retry_policy=FAILS, on_exhausted="troubleshoot")
    handlers.register("orders", "plain", fail, retry_policy=AT_ONCE)
    bus.create_queue("answers")
    bus.send("orders", "policy", command_id="policy", reply_to="answers")
    bus.send("orders", "handler", command_id="handler")
    bus.send("orders", "handler", command_id="command", on_exhausted="fail")
    bus.send_many("orders", [{"command_type": "plain", "command_id": "many", "on_exhausted": "fail"}])
    bus.send("orders", "plain", command_id="plain")
    start_worker(handlers)
    until_settled(db)
    failed, troubled = CommandStatus.FAILED, CommandStatus.IN_TROUBLESHOOTING_QUEUE
    assert {name: record(bus, name).status for name in ("policy", "handler", "command", "many", "plain")} == {
        "policy": failed, "handler": troubled, "command": failed, "many": failed, "plain": troubled,
    }  # fmt: skip
    assert verdicts(db, "policy") == ["RETRY", "FAILED"]
    reply = one(db, "SELECT message FROM pgmq.q_answers")
    assert (reply["outcome"], reply["error"]["code"]) == ("FAILED", "TRANSIENT")
    events = [entry.event for entry in bus.get_audit_trail("orders", "policy")]
    assert events[-2:] == [AuditEvent.FAILED, AuditEvent.RETRY_EXHAUSTED]
    with pytest.raises(CommandFailedError):
        bus.call("orders", "plain", on_exhausted="fail", wait=30)
    assert "attempts used up: FAILED for good (on_exhausted)" in caplog.text


def test_a_permanent_error_still_needs_a_person(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "bad", retry_policy=FAILS)
    def bad(ctx: Any) -> None:
        raise PermanentCommandError("broken data")

    bus.send("orders", "bad", command_id="c", on_exhausted="fail")
    start_worker(handlers)
    until_settled(db)
    assert record(bus, "c").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE


def test_a_batch_need_not_wait_for_a_person(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "fail", retry_policy=AT_ONCE)
    def fail(ctx: Any) -> None:
        raise TransientCommandError("no")

    own = {"command_type": "fail", "command_id": "own", "on_exhausted": "troubleshoot"}
    bus.create_batch("orders", [{"command_type": "fail"}], batch_id="closed", on_exhausted="fail")
    bus.create_batch("orders", [], batch_id="open", on_exhausted="fail", is_open=True)
    bus.add_to_batch("orders", "open", [{"command_type": "fail"}, own])
    bus.close_batch("orders", "open")
    start_worker(handlers)
    assert bus.wait_for_batch("orders", "closed", wait=30).failed == 1
    until(lambda: record(bus, "own").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    until(
        lambda: (found := bus.get_batch("orders", "open")) is not None and (found.failed, found.in_tsq) == (1, 1)
    )


def test_on_complete_when_only_troubleshooting_is_left(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "good")
    def good(ctx: Any) -> None: ...

    ends = [PermanentCommandError("look"), None]

    @handlers.handler("orders", "bad")
    def bad(ctx: Any) -> None:
        if (error := ends.pop(0)) is not None:
            raise error

    bus.create_queue("ends")
    bus.create_batch(
        "orders",
        [{"command_type": "good"}, {"command_type": "bad", "command_id": "bad"}],
        batch_id="b",
        on_complete={"reply_to": "ends"},
        complete_when="only_troubleshooting_left",
    )
    start_worker(handlers)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_ends") == 1)
    summary = one(db, "SELECT message FROM pgmq.q_ends")
    assert (summary["status"], summary["completed"], summary["in_troubleshooting"]) == ("IN_PROGRESS", 1, 1)
    TroubleshootingQueue(bus).operator_retry("orders", "bad", operator="ada")
    batch = bus.wait_for_batch("orders", "b", wait=30)
    assert (batch.status, batch.completed) == ("COMPLETED", 2)
    assert one(db, "SELECT count(*) FROM pgmq.q_ends") == 1  # once, and only once


def test_a_step_that_fails_lets_its_process_compensate(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    undone: list[str] = []

    @handlers.handler("orders", "book")
    def book(ctx: Any) -> None: ...

    @handlers.handler("orders", "unbook")
    def unbook(ctx: Any) -> None:
        undone.append("book")

    @handlers.handler("orders", "ship")
    def ship(ctx: Any) -> None:
        raise TransientCommandError("no truck")

    order = Saga(
        "order",
        step("book", "orders", undo="unbook"),
        step("ship", "orders", on_exhausted="fail", max_attempts=1),
        domain="orders",
    )
    handlers.register_process(order)
    started = bus.start_process(order, {})
    start_worker(handlers)
    until(lambda: (found := bus.get_process("orders", started.process_id)) is not None and found.finished_at)
    found = bus.get_process("orders", started.process_id)
    assert found is not None
    assert (found.status, undone) == ("COMPENSATED", ["book"])
