"""Processes that wait, with a database and a worker: signals, sleeps, nested processes, and people who cancel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    BaseProcessManager,
    BusinessRuleException,
    CommandBus,
    DuplicateSignalError,
    InvalidCommandError,
    InvalidOperationError,
    PermanentCommandError,
    ProcessNotFoundError,
    Saga,
    StepCommand,
    StepProcess,
    StepSignal,
    StepSleep,
    StepUndo,
    TroubleshootingQueue,
    Worker,
    nested,
    parallel,
    sleep,
    step,
    wait_for,
)
from support.sagas import Lab
from support.waiting import one, until
from support.workers import quick_settings

P = "processes"
Db = psycopg.Connection[Any]

APPROVAL = Saga(
    "approval",
    step("reserve", "orders", undo="release"),
    wait_for("ok", deadline="2d"),
    step("ship", "orders"),
)
MAYBE = Saga("maybe", wait_for("ok", deadline="2d", on_timeout="continue", otherwise="nobody"))
TWICE = Saga("twice", wait_for("ok", name="first"), wait_for("ok", name="second"))
SLEEPY = Saga("sleepy", step("reserve", "orders", undo="release"), sleep("3d"), step("ship", "orders"))
INNER = Saga("inner", step("charge", "orders", undo="refund"), step("label", "orders", undo="unlabel"))
OUTER = Saga(
    "outer",
    step("reserve", "orders", undo="release"),
    nested("delivery", INNER),
    step("ship", "orders"),
)
ENDLESS = Saga("endless", nested("again", "endless", data=lambda _: {}))
ALL = (APPROVAL, MAYBE, TWICE, SLEEPY, INNER, OUTER, ENDLESS)


@pytest.fixture
def lab(bus: CommandBus, database: str) -> Lab:
    lab = Lab(bus)
    for saga in ALL:
        lab.handlers.register_process(saga)
    return lab


@contextmanager
def working(lab: Lab, database: str) -> Iterator[Worker]:
    with Worker(lab.handlers, settings=quick_settings(database)) as worker:
        yield worker


@pytest.fixture
def worker(lab: Lab, database: str) -> Iterator[Worker]:
    with working(lab, database) as worker:
        yield worker


def ring(db: Db) -> None:
    """All timers of processes ring now."""
    db.execute("UPDATE pgmq.q_processes__commands SET vt = clock_timestamp() WHERE vt > now() + interval '1 h'")


def waits(lab: Lab, process_id: str, text: str) -> None:
    until(lambda: text in (lab.process(process_id).waits_for or ""), what=lambda: lab.process(process_id))


def outcomes(lab: Lab, process_id: str) -> list[tuple[str, str | None, str]]:
    return [(one.name, one.kind, one.status.value) for one in lab.process(process_id).steps]


# --- signals ----------------------------------------------------------------------------------------------------


def test_a_process_waits_for_its_signal(lab: Lab, worker: Worker, db: Db) -> None:
    lab.bus.start_process(APPROVAL, {"no": 1}, process_id="p")
    waits(lab, "p", "the signal 'ok' since ")
    record = lab.process("p")
    assert " until " in str(record.waits_for)
    assert record.steps[1].deadline_at is not None
    assert record.steps[1].deadline_at - record.steps[1].sent_at > timedelta(days=1.9)
    sent = lab.bus.signal(P, "p", "ok", {"by": "ann"}, operator="ann")
    assert sent.created
    record = lab.until("p", "COMPLETED")
    assert record.state["ok"] == {"by": "ann"}  # type: ignore[index, call-overload]
    (signal,) = record.signals
    assert (signal.name, signal.data, signal.by, signal.step) == ("ok", {"by": "ann"}, "ann", 2)
    assert signal.signal_id == sent.signal_id
    assert (record.steps[1].kind, record.steps[1].command_type) == ("signal", "ok")
    assert record.steps[1].command_id == signal.command_id
    assert one(db, "SELECT count(*) FROM pgmq.q_processes__commands") == 0, "the deadline's timer is gone"
    assert record.strays == []


def test_signals_that_come_before_the_process_begins_are_kept_in_their_order(lab: Lab, database: str) -> None:
    lab.bus.start_process(TWICE, process_id="p")
    for n in range(3):
        lab.bus.signal(P, "p", "ok", n)
    assert [signal.step for signal in lab.process("p").signals] == [None] * 3
    with working(lab, database):
        record = lab.until("p", "COMPLETED")
    assert record.state == {"first": 0, "second": 1}
    assert [signal.step for signal in record.signals] == [1, 2, None]


def test_the_same_signal_twice_is_one_signal(lab: Lab, bus: CommandBus) -> None:
    bus.start_process(TWICE, process_id="p")
    bus.start_process(TWICE, process_id="q")
    receipts = [bus.signal(P, "p", "ok", {"a": 1, "b": [2]}, signal_id="s1") for _ in range(2)]
    assert [receipt.created for receipt in receipts] == [True, False]
    assert bus.signal(P, "q", "ok", None, signal_id="s1").created, "ids are of one process"
    for name, data, difference in (("ok", {"a": 2}, "data"), ("no", {"a": 1, "b": [2]}, "name")):
        with pytest.raises(DuplicateSignalError, match=rf"'s1' was already sent .*\({difference}\)"):
            bus.signal(P, "p", name, data, signal_id="s1")
    assert len(lab.process("p").signals) == 1


def test_many_senders_with_one_id_send_one_signal(lab: Lab, bus: CommandBus, worker: Worker) -> None:
    bus.start_process(TWICE, process_id="p")
    with ThreadPoolExecutor(8) as pool:
        sent = list(pool.map(lambda _: bus.signal(P, "p", "ok", 7, signal_id="s"), range(24)))
    assert sum(receipt.created for receipt in sent) == 1
    waits(lab, "p", "the signal 'ok'")
    until(lambda: len(lab.process("p").steps) == 2)
    assert lab.process("p").state == {"first": 7}


def test_a_signal_joins_the_callers_transaction(lab: Lab, bus: CommandBus, db: Db, worker: Worker) -> None:
    bus.start_process(TWICE, process_id="p")
    waits(lab, "p", "the signal 'ok'")
    with bus.connect() as conn:
        bus.signal(P, "p", "ok", "never", conn=conn)
        conn.rollback()
    assert lab.process("p").signals == []
    with bus.connect() as conn:
        bus.signal(P, "p", "ok", 1, signal_id="s", conn=conn)
    until(lambda: len(lab.process("p").steps) == 2)
    bus.signal(P, "p", "ok", 2)
    assert lab.until("p", "COMPLETED").state == {"first": 1, "second": 2}


def test_who_cannot_be_signaled(lab: Lab, bus: CommandBus, database: str) -> None:
    with pytest.raises(ProcessNotFoundError, match="no process 'nobody' in domain 'processes'"):
        bus.signal(P, "nobody", "ok")
    with pytest.raises(ProcessNotFoundError, match="no process 'p' in domain 'nowhere'"):
        bus.signal("nowhere", "p", "ok")
    bus.start_process(MAYBE, process_id="p")
    for bad, complaint in (("", "signal ''"), ("a\n", "signal"), (3, "signal 3")):
        with pytest.raises(InvalidCommandError, match=complaint):
            bus.signal(P, "p", bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidCommandError, match="data"):
        bus.signal(P, "p", "ok", "x" * (bus.settings.max_payload_bytes + 1))
    with pytest.raises(InvalidCommandError, match="signal_id"):
        bus.signal(P, "p", "ok", signal_id="")
    bus.signal(P, "p", "ok", signal_id="s")
    with working(lab, database):
        lab.until("p", "COMPLETED")
    assert not bus.signal(P, "p", "ok", signal_id="s").created, "it was sent when that was possible"
    with pytest.raises(InvalidOperationError, match=r"cannot send signal 'ok' to process 'p' .*: it is COMPLETED"):
        bus.signal(P, "p", "ok")


def test_async_signals(lab: Lab, database: str, worker: Worker) -> None:
    async def play() -> None:
        async with AsyncCommandBus(database) as bus:
            await bus.start_process(MAYBE, process_id="p")
            sent = await bus.signal(P, "p", "ok", 5)
            assert sent == (P, "p", "ok", sent.signal_id, True)
            assert (await bus.processes.signal(P, "p", "other")).created

    asyncio.run(play())
    assert lab.until("p", "COMPLETED").state == {"ok": 5}


def test_without_a_signal_it_is_undone_at_its_deadline(lab: Lab, worker: Worker, db: Db) -> None:
    lab.bus.start_process(APPROVAL, {}, process_id="p")
    lab.bus.start_process(MAYBE, {}, process_id="q")
    for name in "pq":
        waits(lab, name, "the signal")
    ring(db)
    record = lab.until("p", "COMPENSATED")
    assert record.failure is not None
    assert record.failure["message"] == "step 2 (ok) failed: no signal 'ok' came in time"
    assert lab.world.did == ["reserve", "release"]
    assert lab.until("q", "COMPLETED").state == {"ok": "nobody"}
    with pytest.raises(InvalidOperationError, match="it is COMPENSATED"):
        lab.bus.signal(P, "p", "ok")


def test_of_a_signal_and_a_deadline_exactly_one_wins(lab: Lab, worker: Worker, db: Db) -> None:
    """Both at once, many times: a process that went on has the signal, and one that did not has not."""
    names = [f"p{n}" for n in range(20)]
    for name in names:
        lab.bus.start_process(MAYBE, {}, process_id=name)
    for name in names:
        waits(lab, name, "the signal")
    both = threading.Barrier(2)

    def send(name: str) -> None:
        both.wait()
        with suppress(InvalidOperationError):
            lab.bus.signal(P, name, "ok", "signal")

    with ThreadPoolExecutor(1) as pool:
        for name in names:
            sending = pool.submit(send, name)
            both.wait()
            db.execute(
                "UPDATE pgmq.q_processes__commands SET vt = clock_timestamp() WHERE msg_id IN (SELECT msg_id FROM "
                "commandbus.command WHERE correlation_id = %s AND data ->> 'event' = 'deadline')",
                (name,),
            )
            sending.result()
    for name in names:
        record = lab.until(name, "COMPLETED")
        taken = [signal.step for signal in record.signals]
        assert (record.state, taken) in (
            ({"ok": "signal"}, [1]),
            ({"ok": "nobody"}, [None]),
            ({"ok": "nobody"}, []),
        )


def test_a_signal_that_somebody_canceled_is_not_taken(lab: Lab, bus: CommandBus, database: str) -> None:
    bus.start_process(MAYBE, process_id="p")
    bus.signal(P, "p", "ok", "wrong")
    bus.cancel(P, lab.process("p").signals[0].command_id, operator="ann")
    assert not lab.process("p").status.is_final
    bus.signal(P, "p", "ok", "right")
    with working(lab, database):
        assert lab.until("p", "COMPLETED").state == {"ok": "right"}


# --- sleeps -----------------------------------------------------------------------------------------------------


def test_a_process_sleeps(lab: Lab, worker: Worker, db: Db) -> None:
    lab.bus.start_process(SLEEPY, {}, process_id="p")
    waits(lab, "p", "the end of its sleep at ")
    assert lab.world.did == ["reserve"]
    ring(db)
    record = lab.until("p", "COMPLETED")
    assert outcomes(lab, "p")[1] == ("sleep", "sleep", "COMPLETED")
    assert record.strays == []


def test_a_sleep_until_an_instant_that_has_passed_is_over_at_once(lab: Lab, database: str) -> None:
    saga = Saga("past", sleep(until=lambda _: datetime.now(UTC) - timedelta(days=1)), sleep(0.01, name="short"))
    lab.handlers.register_process(saga)
    lab.bus.start_process(saga, {}, process_id="p")
    with working(lab, database):
        lab.until("p", "COMPLETED")


def test_a_sleep_whose_timer_somebody_canceled_sleeps_on_after_a_retry(lab: Lab, worker: Worker, db: Db) -> None:
    lab.bus.start_process(SLEEPY, {}, process_id="p")
    waits(lab, "p", "the end of its sleep")
    timer = one(db, "SELECT command_id FROM commandbus.command WHERE data ->> 'event' = 'wake'")
    lab.bus.cancel(P, timer, operator="ann")
    assert lab.until("p", "FAILED").failure["code"] == "MESSAGE_ENDED"  # type: ignore[index]
    lab.bus.retry_process(P, "p", operator="ann")
    lab.until("p", "WAITING_FOR_REPLY")
    waits(lab, "p", "the end of its sleep")
    assert lab.world.did == ["reserve"]
    ring(db)
    lab.until("p", "COMPLETED")


# --- people -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saga", [APPROVAL, SLEEPY])
def test_a_process_that_waits_can_be_canceled(lab: Lab, worker: Worker, db: Db, saga: Saga) -> None:
    lab.bus.start_process(saga, {}, process_id="p")
    waits(lab, "p", "the signal" if saga is APPROVAL else "its sleep")
    lab.bus.cancel_process(P, "p", operator="ann", reason="no more")
    record = lab.until("p", "CANCELED")
    assert outcomes(lab, "p")[1][2] == "CANCELED"
    assert lab.world.did == ["reserve", "release"]
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_processes__commands") == 0)
    assert record.strays == []


# --- nested processes -------------------------------------------------------------------------------------------


def test_a_nested_process_runs_and_its_state_is_the_result(lab: Lab, worker: Worker) -> None:
    lab.bus.start_process(OUTER, {"no": 1}, process_id="p")
    record = lab.until("p", "COMPLETED")
    inner = lab.process("p/delivery")
    assert record.state["delivery"] == inner.state  # type: ignore[index, call-overload]
    assert inner.state["label"] == {"by": "label"}  # type: ignore[index, call-overload]
    assert inner.parent == {"domain": P, "process_id": "p", "step": 2}
    assert inner.correlation_id == "p"
    assert lab.world.did == ["reserve", "charge", "label", "ship"]
    assert (record.steps[1].kind, record.steps[1].command_id) == ("process", "p/delivery")


def test_a_nested_process_that_fails_is_undone_and_then_its_parent(lab: Lab, worker: Worker) -> None:
    lab.world.fails["label"] = BusinessRuleException("no paper")
    lab.bus.start_process(OUTER, {}, process_id="p")
    record = lab.until("p", "COMPENSATED")
    assert lab.process("p/delivery").status == "COMPENSATED"
    assert lab.world.did == ["reserve", "charge", "label", "refund", "release"]
    assert record.failure is not None
    assert record.failure["message"] == "step 2 (delivery) failed: step 2 (label) failed: no paper"


def test_a_nested_process_that_completed_is_undone_with_its_parent(lab: Lab, worker: Worker) -> None:
    lab.world.fails["ship"] = BusinessRuleException("no ship")
    lab.bus.start_process(OUTER, {}, process_id="p")
    record = lab.until("p", "COMPENSATED")
    inner = lab.process("p/delivery")
    assert (inner.status, inner.failure["code"]) == ("COMPENSATED", "PARENT_UNDONE")  # type: ignore[index]
    assert lab.world.did == ["reserve", "charge", "label", "ship", "unlabel", "refund", "release"]
    assert [(step.name, step.undoes, step.kind) for step in record.steps[3:]] == [
        ("delivery", 2, "process"),
        ("reserve", 1, None),
    ]
    assert record.strays == inner.strays == []


def test_a_canceled_parent_waits_until_its_nested_process_is_undone(lab: Lab, worker: Worker) -> None:
    lab.world.held["label"] = threading.Event()
    lab.bus.start_process(OUTER, {}, process_id="p")
    lab.until_did("label")
    waits(lab, "p", "the end of the nested process 'p/delivery' of domain 'processes' (step 'delivery'), which is")
    lab.bus.cancel_process(P, "p", operator="ann")
    lab.until("p", "CANCELED")
    inner = lab.process("p/delivery")
    assert inner.status == "CANCELED"
    assert inner.cancel is not None
    assert inner.cancel["by"] == "process p"
    assert lab.world.did == ["reserve", "charge", "label", "refund", "release"]


def test_a_canceled_nested_process_undoes_its_parent(lab: Lab, worker: Worker) -> None:
    lab.world.held["charge"] = threading.Event()
    lab.bus.start_process(OUTER, {}, process_id="p")
    lab.until_did("charge")
    lab.bus.cancel_process(P, "p/delivery", operator="ann", reason="too dear")
    record = lab.until("p", "COMPENSATED")
    assert record.failure is not None
    assert record.failure["message"] == "step 2 (delivery) was canceled: canceled by ann: too dear"


def test_a_nested_process_is_canceled_before_it_begins(lab: Lab, bus: CommandBus, database: str) -> None:
    """Its own domain has no worker yet."""
    bus.create_domain("inner")
    inner = Saga("far", step("charge", "orders"), domain="inner")
    outer = Saga("o", nested("in", inner), deadline="7d")
    lab.handlers.register_process(outer)
    bus.start_process(outer, {}, process_id="p")
    with working(lab, database):
        waits(lab, "p", "which is PENDING")
        bus.cancel_process("inner", "p/in", operator="ann")
        assert lab.until("p", "FAILED").failure is not None
        assert lab.process("p/in", "inner").status == "CANCELED"
        bus.retry_process(P, "p")
        until(lambda: bus.get_process("inner", "p/in~2"), what="a new one is started")
        bus.cancel_process(P, "p", operator="ann")
        with working(far_lab(bus, inner), database):
            lab.until("p", "CANCELED")
    assert lab.process("p/in~2", "inner").status in ("CANCELED", "COMPENSATED"), "it may have begun, and ended"


def far_lab(bus: CommandBus, saga: Saga) -> Lab:
    far = Lab(bus)
    far.handlers.register_process(saga)
    return far


def test_a_nested_process_in_trouble_is_named_by_its_parent(lab: Lab, worker: Worker) -> None:
    lab.world.fails["charge"] = PermanentCommandError("no such card")
    lab.bus.start_process(OUTER, {}, process_id="p")
    waits(lab, "p", "which is WAITING_FOR_TSQ")
    assert lab.process("p").status == "WAITING_FOR_REPLY"
    lab.world.fails.clear()
    (trouble,) = lab.process("p/delivery").troubles
    TroubleshootingQueue(lab.bus).operator_retry(trouble["domain"], trouble["command_id"], operator="ann")
    lab.until("p", "COMPLETED")


def test_the_message_of_a_nested_process_that_is_given_up_undoes_the_parent(lab: Lab, database: str) -> None:
    broken = Saga("broken", step("charge", "nowhere"))
    outer = Saga("o", step("reserve", "orders", undo="release"), nested("in", broken))
    lab.handlers.register_process(broken)
    lab.handlers.register_process(outer)
    with working(lab, database):
        lab.bus.start_process(outer, {}, process_id="p")
        waits(lab, "p", "which is WAITING_FOR_TSQ")
        (trouble,) = lab.process("p/in").troubles
        TroubleshootingQueue(lab.bus).operator_cancel(P, trouble["command_id"], operator="ann")
        assert lab.until("p", "COMPENSATED").failure["code"] == "MESSAGE_ENDED"  # type: ignore[index]
    with pytest.raises(InvalidOperationError, match="it is nested in another process"):
        lab.bus.retry_process(P, "p/in")


class Stubborn(Saga):
    """A saga whose code cannot undo it, until somebody repairs it."""

    is_broken = True

    def compensation(self, step: str, state: dict[str, Any]) -> Any:
        if self.is_broken:
            raise PermanentCommandError("not written yet")
        return super().compensation(step, state)


def test_an_undoing_that_is_given_up_can_be_asked_for_again(lab: Lab, database: str) -> None:
    inner = Stubborn("stubborn", step("charge", "orders", undo="refund"))
    outer = Saga("o", nested("in", inner), step("ship", "orders"))
    for saga in (inner, outer):
        lab.handlers.register_process(saga)
    lab.world.fails["ship"] = BusinessRuleException("no ship")
    with working(lab, database):
        lab.bus.start_process(outer, {}, process_id="p")
        (trouble,) = until(lambda: (found := lab.bus.get_process(P, "p/in")) and found.troubles)
        assert "the undoing of the nested process 'p/in'" in str(lab.process("p").waits_for)
        TroubleshootingQueue(lab.bus).operator_cancel(P, trouble["command_id"], operator="ann")
        assert lab.until("p", "FAILED").failure["code"] == "MESSAGE_ENDED"  # type: ignore[index]
        inner.is_broken = False
        lab.bus.retry_process(P, "p", operator="ann")
        lab.until("p", "COMPENSATED")
    assert lab.process("p/in").status == "COMPENSATED"
    assert lab.world.did == ["charge", "ship", "refund"]


def test_a_process_that_nests_itself_ends_in_the_troubleshooting_queue(lab: Lab, worker: Worker) -> None:
    lab.bus.start_process(ENDLESS, {}, process_id="p")
    deep = "p" + "/again" * 10
    until(lambda: (found := lab.bus.get_process(P, deep)) and found.status == "WAITING_FOR_TSQ")
    (trouble,) = lab.process(deep).troubles
    assert trouble["error_code"] == "NESTED_TOO_DEEP"
    assert "'endless' start itself again and again?" in str(trouble["error"])
    lab.bus.cancel_process(P, "p", operator="ann")
    lab.until("p", "CANCELED")
    assert lab.process(deep).status == "CANCELED"


# --- process managers -------------------------------------------------------------------------------------------


class Careful(BaseProcessManager[dict[str, Any]]):
    """All kinds of steps, by hand."""

    process_type = "careful"

    def first_step(self, state: dict[str, Any]) -> str:
        return "rest"

    def build_command(self, step: str, state: dict[str, Any]) -> Any:
        if step == "rest":
            return StepSleep(0.01)
        if step == "ask":
            return StepSignal("answer", deadline="1h")
        if step == "inner":
            return StepProcess("inner", {"n": 1}, process_id=f"own-{state['id']}", deadline="1h")
        return StepCommand("orders", step)

    def update_state(self, step: str, reply: Any, state: dict[str, Any]) -> None:
        state[step] = reply.outcome

    def next_step(self, step: str, reply: Any, state: dict[str, Any]) -> Any:
        return {"rest": "ask", "ask": "inner", "inner": "ship"}.get(step)

    def compensation(self, step: str, state: dict[str, Any]) -> Any:
        return StepUndo() if step == "inner" else None


class AsyncCareful(Careful):
    """The same on the event loop."""

    process_type = "async_careful"

    async def next_step(self, step: str, reply: Any, state: dict[str, Any]) -> Any:  # type: ignore[override]
        return super().next_step(step, reply, state)


@pytest.mark.parametrize("manager", [Careful(), AsyncCareful()])
def test_a_manager_of_ones_own_waits(lab: Lab, database: str, manager: Careful) -> None:
    lab.handlers.register_process(manager)
    lab.world.fails["ship"] = BusinessRuleException("no ship")
    with working(lab, database):
        lab.bus.start_process(manager, {"id": "p"}, process_id="p")
        lab.bus.signal(P, "p", "answer")
        record = lab.until("p", "COMPENSATED")
    assert record.state == {"id": "p", "rest": "SUCCESS", "ask": "SUCCESS", "inner": "SUCCESS", "ship": "FAILED"}
    inner = lab.process("own-p")
    assert inner.status == "COMPENSATED"
    assert inner.deadline_at is not None


def test_a_nested_process_that_cannot_start_is_a_message_in_trouble(lab: Lab, database: str) -> None:
    clash = Saga("clash", nested("in", INNER, data=lambda _: {"charge": 1}))
    taken = Saga("taken", parallel(nested("in", INNER, data=lambda _: {}), step("reserve", "orders")))
    for saga in (clash, taken):
        lab.handlers.register_process(saga)
    lab.bus.start_process(INNER, {}, process_id="q/in")
    lab.bus.start_process(clash, {}, process_id="p")
    lab.bus.start_process(taken, {}, process_id="q")
    with working(lab, database):
        found = {name: lab.until(name, "WAITING_FOR_TSQ").troubles[0] for name in "pq"}
    assert "keeps the result of step 'charge' under that name" in str(found["p"]["error"])
    assert (found["p"]["error_code"], found["q"]["error_code"]) == ("INVALID_STEP", "DUPLICATE_PROCESS")
    assert "process_id 'q/in' is taken" in str(found["q"]["error"])


def test_a_nested_process_is_kept_as_long_as_the_process_at_the_top(lab: Lab, database: str, db: Db) -> None:
    """Its commands are needed if it is undone later."""
    outer = Saga("long", nested("delivery", INNER), wait_for("ok"))
    lab.handlers.register_process(outer)
    lab.bus.start_process(outer, {}, process_id="p")
    with working(lab, database):
        waits(lab, "p", "the signal 'ok'")
        _age(db)
        lab.bus.prune(age="1d")
        inner = lab.process("p/delivery")
        assert [step.command_status for step in inner.steps] == ["COMPLETED"] * 2
        lab.bus.cancel_process(P, "p", operator="ann")
        lab.until("p", "CANCELED")
        assert lab.world.did == ["charge", "label", "unlabel", "refund"]
    lab.bus.prune(age="1d")
    assert lab.bus.get_process(P, "p/delivery") is not None
    _age(db)
    for _ in range(2):
        lab.bus.prune(age="1d")
    assert (
        one(db, "SELECT (SELECT count(*) FROM commandbus.process) + (SELECT count(*) FROM commandbus.command)")
        == 0
    )


def _age(db: Db) -> None:
    """All that has ended did so ten days ago."""
    for table in ("process", "command"):
        db.execute(
            f"UPDATE commandbus.{table} SET created_at = created_at - interval '10 d', "
            f"finished_at = finished_at - interval '10 d'".encode()
        )
