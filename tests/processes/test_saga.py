"""Processes with a real worker: forwards, backwards, in the troubleshooting queue, canceled, late, and again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    DuplicateProcessError,
    HandlerRegistry,
    InvalidOperationError,
    PermanentCommandError,
    ProcessNotFoundError,
    Saga,
    TroubleshootingQueue,
    UnknownDomainError,
    Worker,
    branch,
    step,
)
from support.running import examples
from support.sagas import BARE, ORDER, TYPES, WIDE, Lab, World
from support.waiting import one, until
from support.workers import quick_settings

LATE = Saga("late", step("reserve", "orders", undo="release"), step("charge", "orders", deadline=0.3))
FORK = Saga(
    "fork",
    branch(lambda state: state["paid"], step("ship", "orders"), step("charge", "orders")),
    step("label", "orders"),
)


@pytest.fixture
def lab(bus: CommandBus, database: str) -> Iterator[Lab]:
    lab = Lab(bus)
    for saga in (ORDER, WIDE, BARE, LATE, FORK):
        lab.handlers.register_process(saga)
    with Worker(lab.handlers, settings=quick_settings(database)):
        yield lab


@pytest.fixture
def tsq(bus: CommandBus) -> TroubleshootingQueue:
    return TroubleshootingQueue(bus)


# --- forwards -------------------------------------------------------------------------------------------


def test_three_steps_in_a_row(lab: Lab) -> None:
    started = lab.bus.start_process(ORDER, {"order": 7}, process_id="p1")
    assert started.created
    record = lab.until("p1", "COMPLETED")
    assert lab.world.did == ["reserve", "charge", "ship"]
    assert record.state == {"order": 7} | {name: {"by": name} for name in ("reserve", "charge", "ship")}
    assert [(one.number, one.name, one.status, one.undoes) for one in record.steps] == [
        (1, "reserve", "COMPLETED", None),
        (2, "charge", "COMPLETED", None),
        (3, "ship", "COMPLETED", None),
    ]
    assert record.steps[1].data == {"order": 7, "reserve": {"by": "reserve"}}
    assert record.steps[1].command_status == "COMPLETED"
    assert record.finished_at is not None
    assert record.waits_for is None


def test_the_same_process_again_is_the_same_process(lab: Lab) -> None:
    assert lab.bus.start_process(ORDER, {"order": 7}, process_id="p1").created
    assert not lab.bus.start_process(ORDER, {"order": 7}, process_id="p1").created
    with pytest.raises(DuplicateProcessError, match=r"'p1' already exists in domain 'processes'.*\(data\)"):
        lab.bus.start_process(ORDER, {"order": 8}, process_id="p1")
    with pytest.raises(DuplicateProcessError, match="process_type"):
        lab.bus.start_process(WIDE, {"order": 7}, process_id="p1")
    lab.until("p1", "COMPLETED")
    assert lab.world.did == ["reserve", "charge", "ship"]


def test_parallel_steps_join(lab: Lab) -> None:
    go_on = lab.world.held["label"] = threading.Event()
    lab.bus.start_process(WIDE, {}, process_id="p1")
    lab.until_did("label")
    until(
        lambda: [one.name for one in lab.process("p1").steps if one.status == "COMPLETED"] == ["reserve", "charge"]
    )
    assert lab.process("p1").status == "WAITING_FOR_REPLY"
    assert "ship" not in lab.world.did
    go_on.set()
    lab.until("p1", "COMPLETED")
    assert lab.world.did[-1] == "ship"


@pytest.mark.parametrize(("paid", "did"), [(True, ["ship", "label"]), (False, ["charge", "label"])])
def test_a_branch_goes_one_way(lab: Lab, *, paid: bool, did: list[str]) -> None:
    lab.bus.start_process(FORK, {"paid": paid}, process_id="p1")
    lab.until("p1", "COMPLETED")
    assert lab.world.did == did


def test_it_starts_with_the_callers_transaction(lab: Lab, database: str) -> None:
    with psycopg.connect(database) as conn:
        lab.bus.start_process(ORDER, {}, process_id="p1", conn=conn)
        assert lab.bus.get_process("processes", "p1") is None
        conn.rollback()
        assert lab.bus.get_process("processes", "p1") is None
        lab.bus.start_process(ORDER, {}, process_id="p2", conn=conn)
    lab.until("p2", "COMPLETED")


def test_more_at_once_than_go_into_one_statement(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    count = examples(201, thorough=1001)
    monkeypatch.setattr("commandbus.flow.processes.start.CHUNK", count - 1)
    started = lab.bus.start_processes(BARE, [{"data": {"n": n}} for n in range(count)])
    assert len({one.process_id for one in started}) == count
    until(lambda: len(lab.world.did) >= 2 * count, 60, what=lambda: f"{len(lab.world.did)}")
    until(lambda: not lab.bus.query_processes(status="WAITING_FOR_REPLY", limit=1))
    assert len(lab.bus.query_processes(status="COMPLETED", process_type="bare", limit=10000)) == count


def test_it_tells_its_starter_how_it_ended(lab: Lab, db: psycopg.Connection[Any]) -> None:
    lab.bus.create_queue("answers")
    lab.bus.start_process(BARE, {"n": 1}, process_id="p1", reply_to="answers", correlation_id="mine")
    lab.until("p1", "COMPLETED")
    reply = one(db, "SELECT message FROM pgmq.q_answers")
    assert reply["outcome"] == "SUCCESS"
    assert (reply["process_id"], reply["process_type"], reply["correlation_id"]) == ("p1", "bare", "mine")
    assert reply["result"]["n"] == 1


# --- backwards ------------------------------------------------------------------------------------------


def test_a_failed_step_compensates_in_reverse(lab: Lab) -> None:
    lab.world.fails["ship"] = BusinessRuleException("no truck")
    lab.bus.start_process(ORDER, {}, process_id="p1")
    record = lab.until("p1", "COMPENSATED")
    assert lab.world.did == ["reserve", "charge", "ship", "refund", "release"]
    assert record.failure is not None
    assert record.failure["step"] == "ship"
    assert "no truck" in record.failure["message"]
    assert [(one.name, one.undoes) for one in record.steps][-2:] == [("charge", 2), ("reserve", 1)]


def test_compensations_are_awaited_one_by_one(lab: Lab) -> None:
    lab.world.fails["ship"] = BusinessRuleException("no truck")
    go_on = lab.world.held["refund"] = threading.Event()
    lab.bus.start_process(ORDER, {}, process_id="p1")
    lab.until_did("refund")
    assert lab.process("p1").status == "COMPENSATING"
    assert "release" not in lab.world.did
    go_on.set()
    lab.until("p1", "COMPENSATED")


def test_what_runs_beside_a_failed_step_is_canceled_and_awaited(lab: Lab) -> None:
    lab.world.held["label"] = threading.Event()
    lab.world.fails["charge"] = BusinessRuleException("no money")
    lab.bus.start_process(WIDE, {}, process_id="p1")
    record = lab.until("p1", "COMPENSATED")
    assert {one.name: one.status for one in record.steps[:3]} == {
        "reserve": "COMPLETED",
        "charge": "FAILED",
        "label": "CANCELED",
    }
    assert lab.world.did[-1] == "release"
    assert "unlabel" not in lab.world.did
    assert "refund" not in lab.world.did


def test_with_nothing_to_undo_it_failed_and_can_be_retried_from_that_step(lab: Lab) -> None:
    lab.world.fails["charge"] = BusinessRuleException("no money")
    lab.bus.start_process(BARE, {}, process_id="p1")
    record = lab.until("p1", "FAILED")
    assert record.failure is not None
    assert "no money" in record.failure["message"]
    del lab.world.fails["charge"]
    lab.bus.retry_process("processes", "p1", operator="ann", reason="paid now")
    record = lab.until("p1", "COMPLETED")
    assert lab.world.did == ["reserve", "charge", "charge"]
    assert [(one.name, one.status) for one in record.steps] == [
        ("reserve", "COMPLETED"),
        ("charge", "FAILED"),
        ("charge", "COMPLETED"),
    ]
    assert record.failure is None


# --- the troubleshooting queue --------------------------------------------------------------------------


def test_a_step_in_the_tsq_is_waited_for_and_retried(lab: Lab, tsq: TroubleshootingQueue) -> None:
    lab.world.fails["charge"] = PermanentCommandError("card reader is down")
    lab.bus.start_process(ORDER, {}, process_id="p1")
    record = lab.until("p1", "WAITING_FOR_TSQ")
    assert record.waits_for is not None
    assert "card reader is down" in record.waits_for
    assert record.in_tsq == 1
    go_on = lab.world.held["charge"] = threading.Event()
    del lab.world.fails["charge"]
    tsq.operator_retry("orders", record.steps[1].command_id)
    assert lab.process("p1").status == "WAITING_FOR_REPLY"
    go_on.set()
    assert lab.until("p1", "COMPLETED").in_tsq == 0


def test_an_operator_completes_a_step_by_hand(lab: Lab, tsq: TroubleshootingQueue) -> None:
    lab.world.fails["charge"] = PermanentCommandError("card reader is down")
    lab.bus.start_process(ORDER, {}, process_id="p1")
    record = lab.until("p1", "WAITING_FOR_TSQ")
    tsq.operator_complete("orders", record.steps[1].command_id, result={"by": "hand"})
    assert lab.until("p1", "COMPLETED").state["charge"] == {"by": "hand"}


def test_an_operators_cancel_of_a_step_in_the_tsq_compensates(lab: Lab, tsq: TroubleshootingQueue) -> None:
    lab.world.fails["charge"] = PermanentCommandError("card reader is down")
    lab.bus.start_process(ORDER, {}, process_id="p1")
    record = lab.until("p1", "WAITING_FOR_TSQ")
    tsq.operator_cancel("orders", record.steps[1].command_id, reason="hopeless")
    record = lab.until("p1", "COMPENSATED")
    assert lab.world.did == ["reserve", "charge", "release"]
    assert record.failure is not None
    assert "hopeless" in record.failure["message"]


def test_a_compensation_that_fails_goes_to_the_tsq_and_the_process_says_so(
    lab: Lab, tsq: TroubleshootingQueue
) -> None:
    lab.world.fails["ship"] = BusinessRuleException("no truck")
    lab.world.fails["refund"] = BusinessRuleException("the bank is closed")
    lab.bus.start_process(ORDER, {}, process_id="p1")
    record = lab.until("p1", "WAITING_FOR_TSQ")
    assert record.is_compensating
    assert record.waits_for is not None
    assert "the bank is closed" in record.waits_for
    assert record.failure is not None
    assert "no truck" in record.failure["message"]
    del lab.world.fails["refund"]
    go_on = lab.world.held["refund"] = threading.Event()
    tsq.operator_retry("orders", record.steps[-1].command_id)
    assert lab.process("p1").status == "COMPENSATING"
    go_on.set()
    lab.until("p1", "COMPENSATED")
    assert lab.world.did == ["reserve", "charge", "ship", "refund", "refund", "release"]


def test_a_compensation_that_a_person_gives_up_fails_the_process_until_it_is_retried(
    lab: Lab, tsq: TroubleshootingQueue
) -> None:
    lab.world.fails["ship"] = BusinessRuleException("no truck")
    lab.world.fails["refund"] = PermanentCommandError("the bank is closed")
    lab.bus.start_process(ORDER, {}, process_id="p1")
    record = lab.until("p1", "WAITING_FOR_TSQ")
    tsq.operator_cancel("orders", record.steps[-1].command_id)
    record = lab.until("p1", "FAILED")
    assert record.failure is not None
    assert "the compensation of step 2 (charge) was canceled" in record.failure["message"]
    del lab.world.fails["refund"]
    lab.bus.retry_process("processes", "p1")
    lab.until("p1", "COMPENSATED")
    assert lab.world.did.count("refund") == 2
    assert lab.world.did.count("release") == 1


# --- people ---------------------------------------------------------------------------------------------


def test_cancelling_a_process_undoes_it(lab: Lab) -> None:
    lab.world.held["charge"] = threading.Event()
    lab.bus.start_process(ORDER, {}, process_id="p1")
    lab.until_did("charge")
    assert (
        lab.bus.cancel_process("processes", "p1", operator="ann", reason="changed my mind") == "WAITING_FOR_REPLY"
    )
    record = lab.until("p1", "CANCELED")
    assert lab.world.did == ["reserve", "charge", "release"]
    assert record.cancel is not None
    assert (record.cancel["by"], record.cancel["reason"]) == ("ann", "changed my mind")
    with pytest.raises(InvalidOperationError, match=r"cannot cancel process 'p1'.*it is CANCELED"):
        lab.bus.cancel_process("processes", "p1")
    with pytest.raises(InvalidOperationError, match="only a FAILED process can be retried"):
        lab.bus.retry_process("processes", "p1")
    with pytest.raises(ProcessNotFoundError, match="no process 'p2'"):
        lab.bus.cancel_process("processes", "p2")


def test_a_process_that_has_not_begun_is_canceled_at_once(bus: CommandBus, database: str) -> None:
    lab = Lab(bus)
    lab.handlers.register_process(ORDER)
    bus.start_process(ORDER, {}, process_id="p1")
    bus.cancel_process("processes", "p1")
    with Worker(lab.handlers, settings=quick_settings(database)):
        lab.until("p1", "CANCELED")
    assert lab.world.did == []


# --- deadlines ------------------------------------------------------------------------------------------


def test_a_steps_deadline_cancels_it_and_compensates(lab: Lab) -> None:
    lab.world.held["charge"] = threading.Event()
    lab.bus.start_process(LATE, {}, process_id="p1")
    record = lab.until("p1", "COMPENSATED")
    assert record.failure is not None
    assert record.failure["code"] == "DEADLINE_EXCEEDED"
    assert lab.world.did == ["reserve", "charge", "release"]


def test_a_steps_deadline_counts_in_the_tsq_too(lab: Lab, tsq: TroubleshootingQueue) -> None:
    lab.world.fails["charge"] = PermanentCommandError("broken")
    lab.bus.start_process(LATE, {}, process_id="p1")
    lab.until("p1", "COMPENSATED")
    assert tsq.count() == 0


def test_the_processs_deadline_undoes_it(lab: Lab) -> None:
    lab.world.held["ship"] = threading.Event()
    lab.bus.start_process(ORDER, {}, process_id="p1", deadline=0.5)
    record = lab.until("p1", "COMPENSATED")
    assert record.failure is not None
    assert record.failure["message"] == "the process's deadline has passed"
    assert lab.world.did[-2:] == ["refund", "release"]


def test_timers_that_are_not_needed_leave_nothing(lab: Lab, db: psycopg.Connection[Any]) -> None:
    slow = Saga("slow", step("reserve", "orders", deadline=3600))
    lab.bus.start_process(
        slow, {}, process_id="p0", deadline=3600
    )  # of no registered type: it is parked, and its timers are not set
    lab.bus.start_process(LATE, {}, process_id="p1", deadline=3600)
    lab.until("p1", "COMPLETED")
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE data ->> 'event' = 'deadline'") == 0
    waiting = (
        "SELECT count(*) FROM pgmq.q_processes__commands WHERE vt > now() + interval '1 minute' "
        "AND msg_id NOT IN (SELECT msg_id FROM commandbus.parked)"
    )
    assert one(db, waiting) == 0


# --- strays ---------------------------------------------------------------------------------------------


def test_strays_are_set_aside_with_a_reason_and_move_nothing(lab: Lab, db: psycopg.Connection[Any]) -> None:
    lab.bus.start_process(ORDER, {}, process_id="p1")
    done = lab.until("p1", "COMPLETED")
    reply = {"outcome": "SUCCESS", "result": None}
    strays: list[tuple[Any, str]] = [
        (
            {"event": "reply", "process": "p1", "step": 1, "reply": reply},
            "the process is COMPLETED, and that is final",
        ),
        ({"event": "reply", "process": "nobody", "step": 1, "reply": reply}, "there is no process 'nobody'"),
        (
            {"event": "reply", "process": "p1", "step": 1, "reply": {"outcome": "MAYBE"}},
            "outcome 'MAYBE' is none of",
        ),
        ({"event": "dance", "process": "p1"}, "event 'dance' is none of"),
        ({"event": "reply", "process": "p1", "step": "two", "reply": reply}, "step 'two' is no number"),
        ({"event": "reply", "process": "p1", "reply": reply}, "names no step"),
        ("garbage", "there is no process None"),
        ({"process": 7}, "there is no process 7"),
        ({"event": "start", "process": "p1"}, "the process is COMPLETED"),
    ]
    for data, _ in strays:
        send_message(lab.bus, db, data)
    until(lambda: len(lab.bus.stray_replies()) == len(strays))
    reasons = [one.reason for one in reversed(lab.bus.stray_replies("processes").items)]
    assert all(any(expected in reason for reason in reasons) for _, expected in strays), reasons
    after = lab.process("p1")
    assert (after.status, after.state, after.steps) == (done.status, done.state, done.steps)
    assert len(after.strays) == 6
    assert one(db, "SELECT count(*) FROM commandbus.tsq") == 0


def send_message(bus: CommandBus, db: psycopg.Connection[Any], data: Any) -> None:
    """A message to process p1 as this package writes it: the columns that say so are not a sender's to set."""
    with db.transaction():
        sent = bus.send("processes", "order", data, conn=db)
        db.execute(
            "UPDATE commandbus.command SET step = 0, process = (SELECT id FROM commandbus.process) WHERE id = %s",
            (sent.id,),
        )


def test_a_reply_that_somebody_sends_as_a_command_moves_nothing(lab: Lab, db: psycopg.Connection[Any]) -> None:
    go_on = lab.world.held["charge"] = threading.Event()
    lab.bus.start_process(ORDER, {}, process_id="p1")
    lab.until_did("charge")
    forged = {"event": "reply", "process": "p1", "step": 1, "reply": {"outcome": "SUCCESS", "result": None}}
    lab.bus.send("processes", "order", forged)
    db.execute(
        "SELECT pgmq.send('processes__commands', %s::jsonb)",
        (json.dumps({"command_type": "order", "data": forged}),),
    )
    until(lambda: len(lab.process("p1").strays) == 2)
    assert {stray.reason for stray in lab.process("p1").strays} == {
        "somebody sent it as a command: it is not a message of process 'p1'"
    }
    assert "ship" not in lab.world.did
    go_on.set()
    lab.until("p1", "COMPLETED")


def test_a_duplicate_of_an_outstanding_steps_reply_counts_once(lab: Lab, db: psycopg.Connection[Any]) -> None:
    go_on = lab.world.held["charge"] = threading.Event()
    lab.bus.start_process(ORDER, {}, process_id="p1")
    lab.until_did("charge")
    twice = {"event": "reply", "process": "p1", "step": 1, "reply": {"outcome": "FAILED"}}
    send_message(lab.bus, db, twice)
    until(lambda: lab.process("p1").strays)
    assert "was handled before" in lab.process("p1").strays[0].reason
    go_on.set()
    lab.until("p1", "COMPLETED")


# --- workers --------------------------------------------------------------------------------------------


def test_processes_move_while_all_slots_are_busy(bus: CommandBus, database: str) -> None:
    """A worker's handlers hold every slot; another worker runs the steps; the first one still moves the
    process."""
    go_on, inside = threading.Event(), threading.Barrier(3)
    busy, steps, world = HandlerRegistry(), HandlerRegistry(), World()

    @busy.handler("slow", "hold")
    def hold(command: Any, ctx: Any) -> None:
        inside.wait(10)
        go_on.wait(20)

    busy.register_process(ORDER)
    for name in TYPES:
        steps.register("orders", name, world.handle)
    bus.create_domain("slow")
    with (
        Worker(busy, settings=quick_settings(database, concurrency=2)),
        Worker(steps, settings=quick_settings(database)),
    ):
        try:
            bus.send_many("slow", [{"command_type": "hold"}] * 2)
            inside.wait(10)
            bus.start_process(ORDER, {}, process_id="p1")
            Lab(bus, world).until("p1", "COMPLETED")
        finally:
            go_on.set()


def test_an_unknown_domain_is_refused_at_the_start(bus: CommandBus) -> None:
    with pytest.raises(UnknownDomainError, match="elsewhere"):
        bus.start_process("order", {}, domain="elsewhere")


def test_a_step_into_an_unknown_domain_waits_for_a_person_and_says_why(
    bus: CommandBus, database: str, db: psycopg.Connection[Any], tsq: TroubleshootingQueue
) -> None:
    lab = Lab(bus)
    saga = Saga("lost", step("reserve", "nowhere"))
    lab.handlers.register_process(saga)
    bus.create_queue("answers")
    with Worker(lab.handlers, settings=quick_settings(database)):
        bus.start_process(saga, {}, process_id="p1", reply_to="answers")
        record = lab.until("p1", "WAITING_FOR_TSQ")
        assert record.waits_for is not None
        assert "its own message in the troubleshooting queue" in record.waits_for
        assert "nowhere" in record.waits_for
        (entry,) = tsq.list("processes")
        tsq.operator_cancel("processes", entry.command_id, reason="give up")
        record = lab.until("p1", "FAILED")
        assert record.failure is not None
        assert record.failure["code"] == "MESSAGE_ENDED"
        reply = one(db, "SELECT message FROM pgmq.q_answers")
        assert (reply["outcome"], reply["error"]["code"]) == ("FAILED", "MESSAGE_ENDED")
        bus.create_domain("nowhere")
        bus.retry_process("processes", "p1")
        record = lab.until("p1", "WAITING_FOR_REPLY")
        assert [one.name for one in record.steps] == ["reserve"]
