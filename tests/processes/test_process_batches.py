"""Batches of processes: the router folds them after its commit, cancelling them is one keeper's work at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from commandbus import (
    BaseProcessManager,
    BatchStatus,
    BusinessRuleException,
    CommandBus,
    OnComplete,
    Saga,
    StepCommand,
    Worker,
    step,
)
from commandbus.flow.batches import batches_of_processes as process_batch
from commandbus.flow.batches import operate as batch_operate
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import Canceling, leftovers
from commandbus.flow.batches.operate import Canceled, mark, resume
from commandbus.flow.commands import operate
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.commands.settle import settle
from commandbus.model.outcome import judge_failure
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.process_messages import handler_of
from support.by_hand import Harness
from support.databases import another_session
from support.sagas import Lab
from support.waiting import one, until
from support.workers import quick_settings

Db = psycopg.Connection[Any]
ONE = Saga("one", step("reserve", "orders"))
LATER = Saga("later", step("reserve", "orders", delay=3600))
CANCEL = operate.operator_action("ann", action="CANCEL")


class Async(BaseProcessManager[dict[str, Any]]):
    """One step; its methods are awaited."""

    process_type = "async"

    def first_step(self, state: Any) -> str:
        return "reserve"

    async def build_command(self, step: str, state: Any) -> StepCommand:
        return StepCommand("orders", "reserve", {})

    def next_step(self, step: str, result: Any, state: Any) -> None:
        return None


@pytest.fixture
def harness(database: str) -> Iterator[Harness]:
    harness = Harness(database)
    yield harness
    harness.close()


def take(bus: CommandBus, domain: str) -> list[Attempt]:
    found = bus.run(claim(domain=domain, worker="w", n=100, lease_seconds=60, cursor=None))
    rows = list(found.ready)
    if found.odd:
        rows += bus.run(put_right(domain=domain, worker="w", odd=found.odd, max_bytes=1_000_000))[0]
    return [Attempt(domain, tuple(row), None, 0.0) for row in sorted(rows)]


def up_to_the_last_message(bus: CommandBus, harness: Harness) -> tuple[int, Attempt]:
    """A batch of one process, and the message that ends it."""
    made = bus.create_process_batch(ONE, [{"data": {}}], batch_id="b", on_complete=OnComplete("orders", "Done"))
    for message in take(bus, "processes"):
        harness.handle(handler_of(ONE), "w", message)
    bus.run(settle("orders", "w", [attempt.complete(None) for attempt in take(bus, "orders")]))
    (last,) = take(bus, "processes")
    return made.id, last


def test_who_folds_waits_for_who_is_folding(bus: CommandBus, db: Db, harness: Harness) -> None:
    """The process ends whoever holds its batch, and the batch with it as soon as that one is done."""
    _, last = up_to_the_last_message(bus, harness)
    with another_session(db) as conn:
        conn.execute("SELECT FROM commandbus.batch FOR NO KEY UPDATE")
        thread = threading.Thread(target=harness.handle, args=(handler_of(ONE), "w", last))
        thread.start()
        until(lambda: one(db, "SELECT status FROM commandbus.process") == "COMPLETED")
        conn.rollback()
        thread.join(20)
    record = bus.get_batch("processes", "b")
    assert record is not None
    assert record.status == BatchStatus.COMPLETED
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE command_type = 'Done'") == 1


def test_a_batch_that_stays_locked_is_left_to_the_sweep(bus: CommandBus, db: Db, harness: Harness) -> None:
    id_, last = up_to_the_last_message(bus, harness)
    with another_session(db) as conn:
        conn.execute("SELECT FROM commandbus.batch FOR NO KEY UPDATE")
        harness.handle(handler_of(ONE), "w", last)
        assert one(db, "SELECT status FROM commandbus.process") == "COMPLETED"
        conn.rollback()
    assert bus.run(leftovers()).to_fold == [id_]
    bus.run(fold([id_]))
    assert one(db, "SELECT status FROM commandbus.batch") == "COMPLETED"


@pytest.mark.parametrize("manager", [ONE, Async()], ids=["sync", "async"])
def test_many_batches_of_processes_end_without_a_sweep(
    bus: CommandBus, database: str, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes end at the same time: none leaves it to another who cannot see it."""
    monkeypatch.setattr("commandbus.worker.maintenance.SWEEP_SECONDS", 1e9)
    lab = Lab(bus)
    lab.handlers.register_process(manager)
    with (
        Worker(lab.handlers, settings=quick_settings(database)),
        Worker(lab.handlers, settings=quick_settings(database)),
    ):
        for number in range(15):
            bus.create_process_batch(manager, [{"data": {}}] * 8, batch_id=f"b{number}")
            record = bus.wait_for_batch("processes", f"b{number}", wait=30)
            assert (record.status, record.completed) == (BatchStatus.COMPLETED, 8)


def test_a_sweep_leaves_processes_to_who_is_cancelling_them(bus: CommandBus, db: Db) -> None:
    bus.create_process_batch(ONE, [{"data": {}}] * 3, batch_id="b")
    canceling: Canceling = bus.run(mark("processes", "b", CANCEL))
    with another_session(db) as conn:
        plan = batch_operate.cancel_processes(canceling, is_sweep=False)
        bus.run(next(plan), conn)
        assert bus.follow(resume(canceling)) == Canceled(canceled=0, requested=0)
        assert one(db, "SELECT count(*) FROM commandbus.process WHERE cancel IS NOT NULL") == 0
        conn.rollback()
    assert bus.follow(resume(canceling)) == Canceled(canceled=0, requested=3)
    assert one(db, "SELECT status FROM commandbus.batch") == "CANCELED"
    assert bus.run(leftovers()) == ([], [])


@pytest.mark.long
def test_a_large_cancellation_is_resumed_while_the_worker_lives_on(bus: CommandBus, db: Db, database: str) -> None:
    """Whoever canceled 400 processes died after the mark. Other batches are looked after meanwhile."""
    lab = Lab(bus)
    lab.handlers.register_process(LATER)
    bus.create_process_batch(LATER, [{"data": {}}] * 400, batch_id="b")
    with Worker(lab.handlers, settings=quick_settings(database)):
        until(lambda: one(db, "SELECT count(*) FROM commandbus.process_step") == 400, 30)
        bus.run(mark("processes", "b", CANCEL))
        oldest = 0.0

        def is_over() -> bool:
            nonlocal oldest
            age = one(db, "SELECT max(extract(epoch FROM now() - heartbeat_at))::float8 FROM commandbus.worker")
            oldest = max(oldest, age)
            return bool(one(db, "SELECT finished_at IS NOT NULL FROM commandbus.batch"))

        until(is_over, 20)
    assert oldest < 7, "a worker whose keeper works must not look dead"
    record = bus.get_batch("processes", "b")
    assert record is not None
    assert (record.status, record.canceled) == (BatchStatus.CANCELED, 400)


def test_a_process_of_a_cancelled_batch_that_is_retried_is_not_cancelled_again(
    bus: CommandBus, db: Db, database: str
) -> None:
    """The batch ended before whoever canceled it could note that all was done."""
    lab = Lab(bus)
    lab.handlers.register_process(ONE)
    lab.handlers.register_process(LATER)
    lab.world.fails["reserve"] = BusinessRuleException("no")
    bus.create_process_batch(ONE, [{"data": {}, "process_id": "bad"}], batch_id="b", is_open=True)
    with Worker(lab.handlers, settings=quick_settings(database)):
        lab.until("bad", "FAILED")
        bus.add_processes_to_batch(LATER, "b", [{"data": {}, "process_id": "good"}])
        lab.until("good", "WAITING_FOR_REPLY")
        canceling = bus.run(mark("processes", "b", CANCEL))
        bus.follow(process_batch.cancel_members(canceling.id, "processes", CANCEL))
        bus.wait_for_batch("processes", "b", wait=20)
        bus.run(batch_operate.done(canceling.id))
    lab.world.fails.clear()
    bus.retry_process("processes", "bad", operator="ann")
    assert one(db, "SELECT finished_at IS NULL FROM commandbus.batch"), "it is open to be swept again"
    assert bus.run(leftovers()).to_cancel == []


def handle_all(bus: CommandBus, harness: Harness) -> None:
    """All messages that wait now, of processes of both types."""
    handlers = {manager.process_type: handler_of(manager) for manager in (ONE, LATER)}
    for message in take(bus, "processes"):
        harness.handle(handlers[message.command().command_type], "w", message)


def one_has_failed_and_one_waits(bus: CommandBus, harness: Harness) -> None:
    """A closed batch of two processes; no worker runs, so nobody sweeps."""
    bus.create_process_batch(ONE, [{"data": {}, "process_id": "bad"}], batch_id="b", is_open=True)
    bus.add_processes_to_batch(LATER, "b", [{"data": {}, "process_id": "good"}])
    bus.close_batch("processes", "b")
    handle_all(bus, harness)
    (attempt,) = take(bus, "orders")
    judgement = judge_failure(BusinessRuleException("no"), charge=1, policy=RetryPolicy(), max_attempts=1)
    bus.run(settle("orders", "w", [attempt.fail(judgement)]))
    handle_all(bus, harness)
    statuses = {record.process_id: record.status.value for record in bus.query_processes(batch_id="b")}
    assert statuses == {"bad": "FAILED", "good": "WAITING_FOR_REPLY"}


def canceled_by_who_died(bus: CommandBus, db: Db, harness: Harness) -> Canceling:
    """The batch has ended CANCELED, and nobody has noted that its cancellation is done."""
    one_has_failed_and_one_waits(bus, harness)
    canceling: Canceling = bus.run(mark("processes", "b", CANCEL))
    bus.follow(process_batch.cancel_members(canceling.id, "processes", CANCEL))
    handle_all(bus, harness)
    assert one(db, "SELECT status FROM commandbus.batch WHERE cancel ->> 'done' IS NULL") == "CANCELED"
    return canceling


def test_a_retried_member_is_swept_only_if_somebody_cancels_again(
    bus: CommandBus, db: Db, harness: Harness
) -> None:
    canceling = canceled_by_who_died(bus, db, harness)
    bus.retry_process("processes", "bad", operator="bob")
    assert one(db, "SELECT finished_at IS NULL FROM commandbus.batch"), "it can be swept again"
    assert bus.run(leftovers()).to_cancel == []
    assert bus.run(mark("processes", "b", operate.operator_action("eve", action="CANCEL"))) == canceling, (
        "and dies, too"
    )
    assert bus.run(leftovers()).to_cancel == [canceling]
    assert bus.follow(resume(canceling)) == Canceled(canceled=0, requested=1)
    assert one(db, "SELECT cancel ->> 'by' FROM commandbus.process WHERE process_id = 'bad'") == "ann"
    assert bus.run(leftovers()).to_cancel == []


def test_members_that_nobody_has_cancelled_yet_are_swept_though_one_is_retried(
    bus: CommandBus, db: Db, harness: Harness
) -> None:
    one_has_failed_and_one_waits(bus, harness)
    canceling = bus.run(mark("processes", "b", CANCEL))
    bus.retry_process("processes", "bad", operator="bob")
    assert bus.run(leftovers()).to_cancel == [canceling]
    bus.follow(resume(canceling))
    handle_all(bus, harness)
    assert one(db, "SELECT status FROM commandbus.process WHERE process_id = 'good'") == "CANCELED"


def test_a_member_is_retried_while_somebody_changes_its_batch(bus: CommandBus, db: Db, harness: Harness) -> None:
    """It waits for the batch's row, and then finds another version of it."""
    canceled_by_who_died(bus, db, harness)
    blocked = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND %s = ANY (pg_blocking_pids(pid))"
    )
    with another_session(db) as conn, ThreadPoolExecutor(1) as pool:
        conn.execute("UPDATE commandbus.batch SET name = 'another'")
        retry = pool.submit(bus.retry_process, "processes", "bad", operator="bob")
        until(lambda: one(db, blocked, conn.info.backend_pid) == 1)
        conn.commit()
        retry.result(20)
    assert bus.run(leftovers()).to_cancel == []
    assert one(db, "SELECT name FROM commandbus.batch") == "another"
