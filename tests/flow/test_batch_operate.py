"""Cancelling a batch, retrying what failed in one, and what retention leaves of batches and processes."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from flow_harness import Bus, at_once, expire_leases, fail, one, queue_length, snapshot, sync_only

from commandbus import (
    BatchStatus,
    BusinessRuleException,
    CommandStatus,
    InvalidCommandError,
    InvalidOperationError,
    NewCommand,
    OnComplete,
    PermanentCommandError,
)
from commandbus.flow.audit.list_actions import list_actions
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import Canceling, leftovers
from commandbus.flow.batches.operate import cancel_bite, mark, resume
from commandbus.flow.commands import operate
from commandbus.flow.commands.renew import pending_cancels
from support.waiting import until

Db = psycopg.Connection[Any]


def commands(count: int, **fields: Any) -> list[NewCommand]:
    return [NewCommand("Ship", {"n": n}, f"c{n:04}", **fields) for n in range(count)]


def states(db: Db) -> dict[str, int]:
    rows = db.execute("SELECT status::text, count(*) FROM commandbus.command WHERE batch IS NOT NULL GROUP BY 1")
    return dict(rows.fetchall())


def members(orders: Bus, batch_id: str = "b") -> list[Any]:
    page = orders.query_commands(domain="orders", batch_id=batch_id, limit=1000)
    found: list[Any] = sorted(page.items, key=lambda item: item.id)
    return found


# --- cancelling -------------------------------------------------------------------------------------------------


def test_cancel_everything(orders: Bus, db: Db) -> None:
    """Waiting, delayed, parked, backing off, running, in the troubleshooting queue, final: each its own way."""
    orders.create_queue("answers")
    orders.create_batch(
        "orders", [*commands(7, reply_to="answers"), NewCommand("Later", None, "later", delay=60)], batch_id="b",
        on_complete=OnComplete("orders", "Done"),
    )  # fmt: skip
    orders.send("orders", "Ship", command_id="alone")
    made = {item.command_id: item for item in orders.claim(n=5)}
    orders.settle(
        [
            made["c0000"].complete(None),
            fail(made["c0001"], BusinessRuleException("no")),
            fail(made["c0002"], PermanentCommandError("no")),
            fail(made["c0003"], ValueError("again")),
        ]
    )
    orders.pause("orders", "Ship", operator="ann")
    orders.put_right(orders.claim_raw("w2", 1), "w2")
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 1
    db.execute("DELETE FROM pgmq.q_answers")
    report = orders.cancel_batch("orders", "b", operator="ann", reason="wrong file")
    assert (report.domain, report.batch_id, report.canceled, report.requested) == ("orders", "b", 5, 1)
    assert [(item.command_id, str(item.status)) for item in members(orders)] == [
        ("c0000", "COMPLETED"), ("c0001", "FAILED"), ("c0002", "CANCELED"), ("c0003", "CANCELED"),
        ("c0004", "IN_PROGRESS"), ("c0005", "CANCELED"), ("c0006", "CANCELED"), ("later", "CANCELED"),
    ]  # fmt: skip
    record = orders.get_batch("orders", "b")
    assert (record.status, record.canceled, record.in_tsq, record.running) == (BatchStatus.IN_PROGRESS, 5, 0, 1)
    assert (record.cancel.by, record.cancel.reason) == ("ann", "wrong file")
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert queue_length(db) == 2, "the one that runs, and the stranger"
    replies = db.execute("SELECT message ->> 'command_id', message ->> 'outcome' FROM pgmq.q_answers ORDER BY 1")
    assert replies.fetchall() == [(name, "CANCELED") for name in ("c0002", "c0003", "c0005", "c0006")]
    trail = [entry.event for entry in orders.get_audit_trail("orders", "c0006")]
    assert trail == ["SENT", "OPERATOR_CANCEL"]
    running = made["c0004"]
    (asked,) = orders.run(pending_cancels("orders", "w1", [running]))
    assert (asked.by, asked.reason) == ("ann", "wrong file")
    assert orders.settle(fail(running, ValueError("no"))) == {(running.msg_id, running.read_ct): "canceled"}
    orders.settle(running.complete(None))
    orders.run(fold([record.id]))
    record = orders.get_batch("orders", "b")
    assert (record.status, record.completed, record.failed, record.canceled) == (BatchStatus.CANCELED, 2, 1, 5)
    (done,) = orders.query_commands(domain="orders", command_type="Done").items
    assert done.data["status"] == "CANCELED"
    assert orders.get_command("orders", "alone").status == CommandStatus.PENDING


def test_cancel_in_bites(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(2500), batch_id="b")
    assert orders.cancel_batch("orders", "b").canceled == 2500
    assert states(db) == {"CANCELED": 2500}
    assert orders.get_batch("orders", "b").status == BatchStatus.CANCELED
    assert queue_length(db) == 0


def test_cancel_an_open_batch(orders: Bus) -> None:
    orders.create_batch("orders", [], batch_id="b", is_open=True, on_complete=OnComplete("orders", "Done"))
    assert orders.cancel_batch("orders", "b").canceled == 0
    record = orders.get_batch("orders", "b")
    assert (record.status, record.is_open) == (BatchStatus.CANCELED, False)
    with pytest.raises(InvalidOperationError, match="it is CANCELED"):
        orders.add_to_batch("orders", "b", commands(1))
    assert len(orders.query_commands(domain="orders", command_type="Done").items) == 1


def test_a_finished_batch_is_not_cancelled(orders: Bus, db: Db) -> None:
    """Also if nobody has noticed that it is finished."""
    orders.create_batch("orders", commands(1), batch_id="b")
    attempt = orders.claim_one()
    orders.settle(attempt.complete(None))
    for _ in range(2):
        before = snapshot(db)
        with pytest.raises(
            InvalidOperationError, match="cannot cancel batch 'b' of domain 'orders': it is COMPLETED"
        ):
            orders.cancel_batch("orders", "b")
        assert snapshot(db) == before
        orders.run(fold([attempt.batch]))


def test_cancelling_again_goes_on(orders: Bus) -> None:
    orders.create_batch("orders", commands(2), batch_id="b")
    attempt = orders.claim_one()
    first = orders.cancel_batch("orders", "b", operator="ann")
    again = orders.cancel_batch("orders", "b", operator="bob")
    assert (first.canceled, first.requested, again.canceled, again.requested) == (1, 1, 0, 0)
    assert orders.get_batch("orders", "b").cancel.by == "ann"
    assert attempt.batch is not None


def test_a_cancellation_that_was_interrupted_is_resumed(orders: Bus, db: Db) -> None:
    """The mark was made, one bite was taken, then whoever canceled died."""
    made = orders.create_batch("orders", commands(30), batch_id="b", on_complete=OnComplete("orders", "Done"))
    operator_action = operate.operator_action("ann", "gone", "CANCEL")
    canceling = orders.run(mark("orders", "b", operator_action))
    orders.run(cancel_bite(canceling, after_id=0, is_sweep=False, bite=10))
    assert states(db) == {"CANCELED": 10, "PENDING": 20}
    found = orders.run(leftovers())
    assert found.to_cancel == [Canceling(made.id, "orders", "commands", operator_action)]
    done = orders.follow(resume(found.to_cancel[0]))
    assert (done.canceled, done.requested) == (20, 0)
    assert orders.get_batch("orders", "b").status == BatchStatus.CANCELED
    assert orders.run(leftovers()) == ([], [])
    assert len(orders.query_commands(domain="orders", command_type="Done").items) == 1


def test_nothing_is_swept_while_the_last_one_stops(orders: Bus) -> None:
    orders.create_batch("orders", commands(3), batch_id="b")
    attempt = orders.claim_one()
    orders.cancel_batch("orders", "b")
    assert orders.run(leftovers()) == ([], []), "everything was asked"
    assert attempt.batch is not None


@sync_only
def test_a_sweep_leaves_it_to_who_is_at_it(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(3), batch_id="b")
    canceling = orders.run(mark("orders", "b", operate.operator_action("ann", action="CANCEL")))
    with psycopg.connect(orders.url) as conn:
        orders.run(cancel_bite(canceling, after_id=0, is_sweep=False), conn)
        assert orders.run(cancel_bite(canceling, after_id=0, is_sweep=True)) is None
        assert orders.follow(resume(canceling)) == (0, 0, 0)
        conn.commit()
    assert states(db) == {"CANCELED": 3}


LOCKED = {
    "queue row": "SELECT FROM pgmq.q_orders__commands ORDER BY msg_id LIMIT 1 FOR UPDATE",
    "command row": "SELECT FROM commandbus.command WHERE batch IS NOT NULL ORDER BY id LIMIT 1 FOR UPDATE",
}


@pytest.mark.parametrize("row", LOCKED)
def test_a_locked_member_holds_up_nobody_and_is_canceled_later(orders: Bus, db: Db, row: str) -> None:
    made = orders.create_batch("orders", commands(50), batch_id="b")
    with psycopg.connect(orders.url) as other:
        other.execute(LOCKED[row].encode())
        report = orders.cancel_batch("orders", "b", operator="ann")  # were it to wait, nobody would end the lock
        assert (report.canceled, report.requested, report.left) == (49, 0, 1)
        assert states(db) == {"CANCELED": 49, "PENDING": 1}
        (canceling,) = orders.run(leftovers()).to_cancel
        assert orders.follow(resume(canceling)) == (0, 0, 1), "a sweep does not wait for it, either"
    (canceling,) = orders.run(leftovers()).to_cancel
    assert orders.follow(resume(canceling)) == (1, 0, 0)
    assert states(db) == {"CANCELED": 50}
    assert orders.run(leftovers()).to_cancel == []
    orders.run(fold([made.id]))
    assert orders.get_batch("orders", "b").status == BatchStatus.CANCELED


def test_a_locked_member_in_trouble_holds_up_nobody_either(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(3), batch_id="b")
    orders.settle([fail(item, PermanentCommandError("no")) for item in orders.claim("w", 2)], "w")
    with psycopg.connect(orders.url) as other:
        other.execute("SELECT FROM commandbus.tsq ORDER BY command LIMIT 1 FOR UPDATE")
        report = orders.cancel_batch("orders", "b", operator="ann")  # were it to wait, nobody would end the lock
        assert (report.canceled, report.left) == (2, 1)
    (canceling,) = orders.run(leftovers()).to_cancel
    assert orders.follow(resume(canceling)) == (1, 0, 0)
    assert states(db) == {"CANCELED": 3}


@sync_only
def test_a_lock_of_a_moment_is_waited_for(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(5), batch_id="b")
    with psycopg.connect(orders.url) as other:
        other.execute(LOCKED["queue row"].encode())

        def release() -> None:
            until(lambda: states(db) == {"CANCELED": 4, "PENDING": 1})
            other.rollback()

        report, _ = at_once([lambda: orders.cancel_batch("orders", "b"), release])
    assert (report.canceled, report.left) == (5, 0)


def test_who_was_asked_and_vanished_is_canceled(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(1), batch_id="b")
    orders.claim_one()
    assert orders.cancel_batch("orders", "b").requested == 1
    expire_leases(db)
    assert orders.claim("w2") == []
    found = orders.run(leftovers())
    orders.run(fold(found.to_fold))
    assert orders.get_batch("orders", "b").status == BatchStatus.CANCELED


@sync_only
def test_cancelling_while_workers_settle_and_operators_retry(orders: Bus, db: Db) -> None:
    """Nothing is left over, and the counts are the commands'."""
    for number in range(5):
        name = f"b{number}"
        made = orders.create_batch("orders", [NewCommand("Ship") for _ in range(60)], batch_id=name)
        first = orders.claim(name, 20)
        orders.settle([fail(item, PermanentCommandError("no")) for item in first], name)

        def work(name: str = name) -> None:
            for _ in range(6):
                for item in orders.claim(name, 5):
                    if orders.settle(fail(item, PermanentCommandError("no")), name, waiting=True):
                        orders.settle(item.complete(None), name, waiting=True)

        def retry() -> None:
            for _ in range(4):
                orders.tsq.retry_all("orders", operator="bob")

        answers = at_once([lambda name=name: orders.cancel_batch("orders", name), work, retry])
        assert not any(isinstance(answer, BaseException) for answer in answers), answers
        for item in orders.claim(name, 100):
            orders.settle(item.complete(None), name)
        for canceling in orders.run(leftovers()).to_cancel:
            orders.follow(resume(canceling))
        orders.run(fold([made.id]))
        record = orders.get_batch("orders", name)
        found = dict(
            db.execute(
                "SELECT status::text, count(*) FROM commandbus.command WHERE batch = %s GROUP BY 1", (made.id,)
            ).fetchall()
        )
        assert set(found) <= {"CANCELED", "COMPLETED"}, found
        assert record.status == BatchStatus.CANCELED
        assert (record.canceled, record.completed) == (found.get("CANCELED", 0), found.get("COMPLETED", 0))
        assert record.in_tsq == 0


# --- retrying ---------------------------------------------------------------------------------------------------


@pytest.fixture
def failed(orders: Bus) -> Bus:
    """A batch of five: one completed, two FAILED for good, two in the troubleshooting queue."""
    orders.create_queue("answers")
    given = {"correlation_id": "k", "reply_to": "answers", "max_attempts": 4, "headers": {"h": 1}, "timeout": 9}
    orders.create_batch("orders", commands(5, **given), batch_id="b", on_complete=OnComplete("orders", "Done"))
    made = orders.claim()
    orders.settle(
        [
            made[0].complete(None),
            *(fail(item, BusinessRuleException("no")) for item in made[1:3]),
            *(fail(item, PermanentCommandError("no")) for item in made[3:]),
        ]
    )
    return orders


def test_retry_what_failed(failed: Bus) -> None:
    report = failed.retry_failed("orders", "b", operator="ann", reason="fixed")
    assert (report.retried, report.sent_again, report.sent_before) == (2, 2, 0)
    assert [item.status for item in members(failed)] == [
        "COMPLETED", "FAILED", "FAILED", "PENDING", "PENDING"
    ]  # fmt: skip
    old, new = failed.get_batch("orders", "b"), failed.get_batch("orders", report.new_batch_id)
    assert (old.in_tsq, old.failed, old.total) == (0, 2, 5)
    assert (new.retry_of, new.name, new.total, new.on_complete) == ("b", "retry of b", 2, None)
    for old_one, new_one in zip(members(failed)[1:3], members(failed, report.new_batch_id), strict=True):
        assert new_one.command_id != old_one.command_id
        for field in ("command_type", "data", "headers", "max_attempts", "timeout", "correlation_id", "reply_to"):
            assert getattr(new_one, field) == getattr(old_one, field)
    made = failed.claim()
    assert len(made) == 4
    failed.settle([item.complete(None) for item in made])
    failed.run(fold([old.id, new.id]))
    assert failed.get_batch("orders", "b").status == BatchStatus.COMPLETED_WITH_FAILURES
    assert failed.get_batch("orders", report.new_batch_id).status == BatchStatus.COMPLETED
    events = [entry.event for entry in failed.get_audit_trail("orders", "c0003")]
    assert "OPERATOR_RETRY" in events


def test_nothing_is_sent_again_twice(failed: Bus, db: Db) -> None:
    first = failed.retry_failed("orders", "b")
    before = one(db, "SELECT count(*) FROM commandbus.command"), one(db, "SELECT count(*) FROM commandbus.batch")
    again = failed.retry_failed("orders", "b")
    assert (again.retried, again.sent_again, again.sent_before, again.new_batch_id) == (0, 0, 2, None)
    counts = one(db, "SELECT count(*) FROM commandbus.command"), one(db, "SELECT count(*) FROM commandbus.batch")
    assert counts == before
    made = failed.claim()
    failed.settle([fail(item, BusinessRuleException("no")) for item in made])
    third = failed.retry_failed("orders", first.new_batch_id, on_complete=OnComplete("orders", "Finally"))
    assert (third.sent_again, failed.get_batch("orders", third.new_batch_id).retry_of) == (2, first.new_batch_id)
    fourth = failed.retry_failed("orders", "b")
    assert (fourth.sent_again, fourth.sent_before) == (2, 2), "those that were in the troubleshooting queue"


@sync_only
def test_of_two_who_retry_at_once(failed: Bus) -> None:
    reports = at_once([lambda: failed.retry_failed("orders", "b")] * 4)
    assert sum(report.sent_again for report in reports if not isinstance(report, BaseException)) == 2, reports
    assert sum(report.retried for report in reports if not isinstance(report, BaseException)) == 2


def test_nothing_failed(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(2), batch_id="b")
    report = orders.retry_failed("orders", "b")
    assert (report.retried, report.sent_again, report.sent_before, report.new_batch_id) == (0, 0, 0, None)
    assert one(db, "SELECT count(*) FROM commandbus.batch") == 1


def test_many_failed(orders: Bus) -> None:
    orders.create_batch("orders", commands(2300), batch_id="b")
    for attempt in [orders.claim(n=2300)]:
        orders.settle(
            [
                fail(item, BusinessRuleException("no") if number % 2 else PermanentCommandError("no"))
                for number, item in enumerate(attempt)
            ]
        )
    report = orders.retry_failed("orders", "b")
    assert (report.retried, report.sent_again) == (1150, 1150)
    assert orders.get_batch("orders", report.new_batch_id).total == 1150


# --- retention --------------------------------------------------------------------------------------------------


def _age(db: Db, days: int) -> None:
    for table in ("command", "batch", "process"):
        db.execute(
            f"UPDATE commandbus.{table} SET created_at = created_at - make_interval(days => %(days)s), "
            f"finished_at = finished_at - make_interval(days => %(days)s)".encode(),
            {"days": days},
        )


def test_members_of_unfinished_batches_are_spared(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(3), batch_id="b")
    made = orders.claim()
    orders.settle([item.complete(None) for item in made[:2]])
    orders.run(fold([made[0].batch]))
    _age(db, 30)
    assert orders.prune(age="1d").commands == 0
    assert orders.prune(count=0).commands == 0
    orders.settle(made[2].complete(None))
    orders.run(fold([made[0].batch]))
    report = orders.prune(age="1d")
    assert (report.commands, report.batches) == (2, 0), "the batch is young, and has a member"
    _age(db, 30)
    report = orders.prune(age="1d")
    assert (report.commands, report.batches) == (1, 1)
    assert orders.get_batch("orders", "b") is None


def test_a_batch_stays_while_it_has_members(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(1), batch_id="b")
    attempt = orders.claim_one()
    orders.settle(attempt.complete(None))
    orders.run(fold([attempt.batch]))
    db.execute("UPDATE commandbus.batch SET finished_at = now() - interval '9 days'")
    assert orders.prune(age="1d").batches == 0
    assert orders.prune(count=0).commands == 1
    assert orders.get_batch("orders", "b") is None


def test_an_empty_batch_is_not_forgotten_at_once(orders: Bus) -> None:
    orders.create_batch("orders", [], batch_id="b")
    assert orders.prune(count=0).batches == 0
    assert orders.get_batch("orders", "b") is not None


def test_processes(orders: Bus, db: Db) -> None:
    """Commands of one that is not finished, or not for long, stay; with the last command the process goes."""
    for name, finished in (("open", None), ("young", "1 hour"), ("old", "9 days")):
        db.execute(
            "INSERT INTO commandbus.process (domain, process_id, process_type, finished_at) "
            "VALUES ('orders', %s, 'p', now() - %s::interval)",
            (name, finished),
        )
        orders.send("orders", "Ship", command_id=name)
    db.execute(
        "UPDATE commandbus.command c SET process = p.id, step = 1 FROM commandbus.process p "
        "WHERE p.process_id = c.command_id"
    )
    db.execute(
        "INSERT INTO commandbus.process_step (process, number, name, command, domain, command_id, command_type) "
        "SELECT process, 1, 's', id, domain, command_id, command_type FROM commandbus.command"
    )
    db.execute(
        "INSERT INTO commandbus.stray_reply (domain, process, reason, created_at) "
        "SELECT 'orders', id, 'late', now() - interval '9 days' FROM commandbus.process UNION ALL "
        "SELECT 'orders', NULL, 'whose?', now() - interval '9 days'"
    )
    orders.settle([item.complete(None) for item in orders.claim()])
    db.execute("UPDATE commandbus.command SET created_at = now() - interval '9 days'")
    db.execute("UPDATE commandbus.command SET finished_at = created_at")
    report = orders.prune(age="1d")
    assert (report.commands, report.processes, report.asides) == (1, 1, 1)
    left = "SELECT array_agg(process_id ORDER BY process_id) FROM commandbus.process"
    assert one(db, left) == ["open", "young"]
    for table in ("process_step", "stray_reply", "command"):
        assert one(db, f"SELECT count(*) FROM commandbus.{table}") == 2


def test_what_operators_do_to_a_batch_is_recorded(orders: Bus) -> None:
    orders.create_batch("orders", [NewCommand("ship")], batch_id="b/1", is_open=True)
    orders.create_batch("orders", [NewCommand("ship")], batch_id="own", is_open=True)
    orders.close_batch("orders", "own")
    assert orders.close_batch("orders", "b/1", operator="ann", reason="its program is gone")
    assert not orders.close_batch("orders", "b/1", operator="bob")
    orders.retry_failed("orders", "b/1", operator="ann")
    orders.cancel_batch("orders", "b/1", operator="bob", reason="not needed")
    with pytest.raises(InvalidCommandError, match="a reason needs an operator"):
        orders.close_batch("orders", "own", reason="x")
    found = [item for item in orders.run(list_actions(domain="orders")) if item.kind == "control"]
    assert [(item.subject, item.action, item.operator, item.reason) for item in found] == [
        ("batch orders/b/1", "CANCEL", "bob", "not needed"),
        ("batch orders/b/1", "RETRY", "ann", None),
        ("batch orders/b/1", "CLOSE", "ann", "its program is gone"),
    ], "a program that closes its own batch is no operator, and one that was closed already was not closed again"
