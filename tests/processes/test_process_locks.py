"""Two at once, deterministically: routers, workers and people who meet at one process wait for each other at most
in one direction; and what only a certain order of events shows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    PermanentCommandError,
    ProcessRecord,
    Saga,
    StepCommand,
    TroubleshootingQueue,
    parallel,
    step,
)
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.commands.settle import cancellation, settle
from commandbus.model.outcome import Judgement, Verdict, judge_failure
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.process_messages import handler_of
from support.by_hand import Harness, Interruption
from support.waiting import one, until

Db = psycopg.Connection[Any]
POLICY = RetryPolicy(max_attempts=2, backoff_schedule=[0], jitter=0)
WIDE = Saga(
    "wide",
    step("first", "orders", undo="undo_first"),
    parallel(*[step(name, "orders", undo=f"undo_{name}") for name in "abc"]),
)
DOUBLE = """
WITH copy AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, correlation_id, data, process, step)
    SELECT c.domain, 'copy', c.command_type, nextval('pgmq.q_processes__commands_msg_id_seq'), c.correlation_id,
           c.data, c.process, c.step
      FROM commandbus.command c JOIN pgmq.q_processes__commands q USING (msg_id)
     WHERE c.domain = 'processes'
    RETURNING id, msg_id
)
INSERT INTO pgmq.q_processes__commands (msg_id, vt, message) OVERRIDING SYSTEM VALUE
SELECT msg_id, clock_timestamp(), jsonb_build_object('command', id) FROM copy
"""
BROKEN = PermanentCommandError("broken")
REFUSED = BusinessRuleException("no")


class Lab:
    """Works by hand: `take` a message or a step, `settle` a step, `handle` a message."""

    def __init__(self, bus: CommandBus, database: str) -> None:
        self.bus = bus
        self.harness = Harness(database)
        self.tsq = TroubleshootingQueue(bus)
        self.handler = handler_of(WIDE)

    def take(self, domain: str, n: int = 9) -> list[Attempt]:
        found = self.bus.run(claim(domain=domain, worker="w", n=n, lease_seconds=60, cursor=None))
        rows = list(found.ready)
        if found.odd:
            rows += self.bus.run(put_right(domain=domain, worker="w", odd=found.odd, max_bytes=9999))[0]
        attempts = [Attempt(domain, tuple(row), None, 0.0) for row in rows]
        for attempt in attempts:
            attempt.started = attempt.row[17] / 1e6
        return attempts

    def settle(self, attempt: Attempt, error: Exception | None = None, bus: CommandBus | None = None) -> Any:
        settlement = attempt.complete("null")
        if error is not None:
            settlement = attempt.fail(judge_failure(error, charge=1, policy=POLICY, max_attempts=None))
        return (bus or self.bus).run(settle(attempt.domain, "w", [settlement], waiting=True))

    def give_up(self, attempt: Attempt) -> Any:
        """As a settler does with what somebody asked to cancel."""
        settlement = attempt.fail(Judgement(Verdict.CANCELED, cancellation("ann", None)))
        return self.bus.run(settle(attempt.domain, "w", [settlement], waiting=True))

    def handle(self, attempt: Attempt, interruption: Interruption | None = None) -> None:
        self.harness.handle(self.handler, "w", attempt, interruption)

    def handle_all(self) -> None:
        while attempts := self.take("processes"):
            for attempt in attempts:
                self.handle(attempt)

    def started(self) -> dict[str, Attempt]:
        """A process whose three parallel steps are held."""
        self.bus.start_process(WIDE, {}, process_id="p")
        self.handle_all()
        self.settle(self.take("orders")[0])
        self.handle_all()
        return {attempt.command_type: attempt for attempt in self.take("orders")}

    def process(self) -> ProcessRecord:
        found = self.bus.get_process("processes", "p")
        assert found is not None
        return found

    def drain(self) -> ProcessRecord:
        for _ in range(20):
            self.handle_all()
            for attempt in self.take("orders"):
                self.settle(attempt)
        return self.process()


@pytest.fixture
def lab(bus: CommandBus, database: str) -> Iterator[Lab]:
    lab = Lab(bus, database)
    yield lab
    lab.harness.close()


@pytest.mark.parametrize("statement", range(1, 16))
def test_who_cancels_steps_and_who_settles_them_do_not_wait_for_each_other_in_a_circle(
    lab: Lab, db: Db, database: str, statement: int
) -> None:
    """Of three steps one is in the troubleshooting queue, one fails; the third is on its way there."""
    steps = lab.started()
    lab.settle(steps["a"], BROKEN)
    lab.settle(steps["b"], REFUSED)
    (reply,) = lab.take("processes")
    answers: list[Any] = []

    def settle_third() -> None:
        with CommandBus(database) as bus:
            try:
                answers.append(lab.settle(steps["c"], BROKEN, bus))
            except psycopg.Error as error:
                answers.append(error)

    thread = threading.Thread(target=settle_third)

    def meanwhile() -> None:
        thread.start()
        until(
            lambda: (
                answers
                or one(db, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                           "AND wait_event_type = 'Lock'")
            )
        )  # fmt: skip

    lab.handle(reply, Interruption(statement, meanwhile))
    if thread.ident is not None:
        thread.join(20)
        assert not isinstance(answers[0], psycopg.Error), answers
    lab.give_up(steps["c"])
    lab.tsq.cancel_all("orders", operator="ann")
    record = lab.drain()
    assert record.status == "COMPENSATED"
    assert [one.name for one in record.steps if one.undoes] == ["first"]


class Named(Saga):
    """Its commands have names of their own, as idempotency keys of some other system."""

    def build_command(self, step: str, state: dict[str, Any]) -> StepCommand:
        return replace(super().build_command(step, state), command_id=f"{state['order']}-{step}")


@pytest.mark.parametrize("statement", range(1, 6))
def test_a_doubled_reply_that_is_handled_at_once_is_set_aside(
    lab: Lab, db: Db, database: str, statement: int
) -> None:
    """Both want to send the next step; the second finds that somebody was faster."""
    saga = Named("named", step("a", "orders"), step("b", "orders"), step("c", "orders"))
    lab.handler = handler_of(saga)
    lab.bus.start_process(saga, {"order": 7}, process_id="p")
    lab.handle_all()
    lab.settle(lab.take("orders")[0])
    db.execute(DOUBLE)
    first, second = lab.take("processes")
    late: list[Attempt] = []
    impatient = Harness(psycopg.conninfo.make_conninfo(database, options="-c lock_timeout=50"))

    def meanwhile() -> None:
        try:
            impatient.handle(lab.handler, "w", second)
        except psycopg.errors.LockNotAvailable:
            late.append(second)

    lab.handle(first, Interruption(statement, meanwhile))
    for attempt in late:
        lab.handle(attempt)
    impatient.close()
    record = lab.process()
    assert [(one.name, one.status.value) for one in record.steps] == [("a", "COMPLETED"), ("b", "SENT")]
    assert [stray.reason for stray in record.strays] == [
        "the reply to step 1 (a) was handled before: it is COMPLETED"
    ]
    assert lab.drain().status == "COMPLETED"


def test_a_retried_process_says_that_a_step_is_still_in_the_troubleshooting_queue(lab: Lab) -> None:
    steps = lab.started()
    lab.settle(steps["a"], BROKEN)
    lab.settle(steps["b"])
    (reply,) = lab.take("processes")
    lab.settle(reply, BROKEN)
    lab.tsq.operator_cancel("processes", reply.command_id, operator="ann")
    record = lab.process()
    assert (record.status, record.in_tsq) == ("FAILED", 1)
    lab.bus.retry_process("processes", "p", operator="ann")
    record = lab.process()
    assert record.status == "WAITING_FOR_TSQ"
    assert record.failure is None
    assert record.waits_for is not None
    assert "broken" in record.waits_for
    lab.handle_all()
    assert lab.process().status == "WAITING_FOR_TSQ"
    lab.tsq.operator_retry("orders", steps["a"].command_id, operator="ann")
    assert lab.process().status == "WAITING_FOR_REPLY"
    lab.settle(steps["c"])
    assert lab.drain().status == "COMPLETED"


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_message_that_is_canceled_while_it_runs_fails_its_process(lab: Lab, db: Db, is_lost: bool) -> None:
    steps = lab.started()
    lab.settle(steps["b"])
    (reply,) = lab.take("processes")
    lab.bus.cancel("processes", reply.command_id, operator="ann")
    assert list(lab.settle(reply, BROKEN).values()) == ["canceled"]
    if is_lost:
        db.execute("UPDATE pgmq.q_processes__commands SET vt = now() - interval '1 s' WHERE headers ? 'held_by'")
        assert lab.take("processes") == []
    else:
        lab.give_up(reply)
    record = lab.process()
    assert (record.status, record.failure and record.failure["code"]) == ("FAILED", "MESSAGE_ENDED")
    lab.settle(steps["a"])
    lab.settle(steps["c"])
    lab.handle_all()
    lab.bus.retry_process("processes", "p", operator="ann")
    assert lab.drain().status == "COMPLETED", "and what it missed is told again"


def test_rubbish_that_looks_like_a_missed_reply_is_not_brought_back(lab: Lab) -> None:
    steps = lab.started()
    lab.settle(steps["b"])
    (reply,) = lab.take("processes")
    rubbish = {"process": "p", "event": "reply", "step": 3, "reply": {"outcome": "MAYBE"}}
    lab.bus.send("processes", "wide", rubbish)
    lab.handle_all()
    lab.settle(reply, BROKEN)
    lab.tsq.operator_cancel("processes", reply.command_id, operator="ann")
    lab.bus.retry_process("processes", "p", operator="ann")
    lab.settle(steps["a"])
    lab.settle(steps["c"])
    assert lab.drain().status == "COMPLETED"


def test_a_batch_of_processes_is_canceled_though_one_is_being_undone(lab: Lab) -> None:
    lab.bus.create_process_batch(WIDE, [{"process_id": name, "data": {}} for name in "pqr"], batch_id="b")
    lab.handle_all()
    first = lab.take("orders")
    for attempt in first:
        lab.settle(attempt)
    lab.handle_all()
    held = {(attempt.row[9], attempt.command_type): attempt for attempt in lab.take("orders")}
    lab.settle(held["p", "a"], REFUSED)
    lab.handle_all()
    assert lab.process().status == "COMPENSATING"
    report = lab.bus.cancel_batch("processes", "b", operator="ann")
    assert report.requested + report.canceled == 2
    for attempt in held.values():
        lab.settle(attempt)
    lab.drain()
    batch = lab.bus.get_batch("processes", "b")
    assert batch is not None
    assert (batch.status, batch.canceled, batch.failed) == ("CANCELED", 2, 1)
