"""The troubleshooting queue and cancel: guarded by state, locked, written down with the operator's name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from flow_harness import (
    Bus,
    at_once,
    expire_leases,
    fail,
    one,
    queue_length,
    snapshot,
    sync_only,
    wait_until_blocked,
)

from commandbus import (
    BusinessRuleException,
    CancelResult,
    CommandBus,
    CommandNotFoundError,
    CommandStatus,
    InvalidCommandError,
    InvalidOperationError,
    NewCommand,
    PermanentCommandError,
    TroubleshootingQueue,
)


def _trouble(bus: Bus, *ids: str, command_type: str = "Ship", code: str = "BROKEN", **more: Any) -> None:
    """Send these and let them end in the troubleshooting queue."""
    bus.send_many("orders", [NewCommand(command_type, {"id": name}, command_id=name, **more) for name in ids])
    attempts = bus.claim()
    assert bus.settle([fail(attempt, PermanentCommandError("no", code=code)) for attempt in attempts]) == {}


def test_list_and_count(orders: Bus) -> None:
    orders.create_domain("billing")
    _trouble(orders, "a", "b", code="X")
    _trouble(orders, "c", command_type="Pack", code="Y")
    tsq = orders.tsq
    assert [entry.command_id for entry in tsq.list()] == ["a", "b", "c"]
    assert tsq.count() == 3
    assert tsq.count_by_type() == {("orders", "Ship"): 2, ("orders", "Pack"): 1}
    assert [entry.command_id for entry in tsq.list("orders", "Ship")] == ["a", "b"]
    assert [entry.command_id for entry in tsq.list(error_code="Y")] == ["c"]
    assert tsq.count("orders", error_code="X") == 2
    assert tsq.count("billing") == 0
    assert tsq.list("billing").items == []
    first = tsq.list(limit=1)
    assert [entry.command_id for entry in first] == ["a"]
    assert [entry.command_id for entry in tsq.list(limit=5, cursor=first.next_cursor)] == ["b", "c"]
    entry = first[0]
    assert (entry.domain, entry.command_type, entry.attempt, entry.data) == ("orders", "Ship", 1, {"id": "a"})
    assert (entry.error_type, entry.error_code, entry.error) == ("PermanentCommandError", "X", "no")


def test_retry_starts_attempts_again_and_numbers_go_on(orders: Bus, db: psycopg.Connection[Any]) -> None:
    _trouble(orders, "k", max_attempts=2)
    orders.tsq.operator_retry("orders", "k", operator="ann", reason="fixed it")
    record = orders.get_command("orders", "k")
    assert (record.status, record.attempts, record.result) == (CommandStatus.PENDING, 1, None)
    assert orders.tsq.count() == 0
    for number, charge in ((2, 1), (3, 2)):
        attempt = orders.claim_one()
        assert (attempt.number, attempt.charge) == (number, charge)
        orders.settle(fail(attempt, ValueError()))
    assert orders.get_command("orders", "k").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
    orders.tsq.operator_retry("orders", "k", operator="bob")
    attempt = orders.claim_one()
    assert (attempt.number, attempt.charge) == (4, 1)
    orders.settle(attempt.complete('"at last"'))
    record = orders.get_command("orders", "k")
    assert (record.status, record.attempts, record.result) == (CommandStatus.COMPLETED, 4, "at last")
    actions = db.execute(
        "SELECT action, operator, reason, attempt_base FROM commandbus.operator_action ORDER BY id"
    )
    assert actions.fetchall() == [("RETRY", "ann", "fixed it", 1), ("RETRY", "bob", None, 3)]
    assert [entry.event.value for entry in orders.get_audit_trail("orders", "k")] == [
        "SENT",
        *("RECEIVED", "FAILED", "MOVED_TO_TSQ", "OPERATOR_RETRY"),
        *("RECEIVED", "FAILED", "RETRY_SCHEDULED"),
        *("RECEIVED", "FAILED", "RETRY_EXHAUSTED", "MOVED_TO_TSQ", "OPERATOR_RETRY"),
        *("RECEIVED", "COMPLETED"),
    ]


def test_a_waived_attempt_before_a_retry_is_no_credit_after_it(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k", max_attempts=1)
    orders.settle(orders.claim_one().give_back())
    orders.settle(fail(orders.claim_one(), ValueError()))
    orders.tsq.operator_retry("orders", "k")
    attempt = orders.claim_one()
    assert (attempt.number, attempt.charge) == (3, 1)


def test_cancel_and_complete_end_it(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_queue("answers")
    _trouble(orders, "a", "b", reply_to="answers")
    orders.tsq.operator_cancel("orders", "a", operator="ann", reason="a duplicate")
    orders.tsq.operator_complete("orders", "b", {"by": "hand"}, operator="bob", reason="done by phone")
    canceled, completed = (orders.get_command("orders", name) for name in "ab")
    assert (canceled.status, canceled.result) == (CommandStatus.CANCELED, None)
    assert (completed.status, completed.result) == (CommandStatus.COMPLETED, {"by": "hand"})
    assert canceled.attempts == completed.attempts == 1
    assert canceled.finished_at is not None
    assert completed.finished_at is not None
    assert orders.tsq.count() == 0
    replies = [row[0] for row in db.execute("SELECT message FROM pgmq.q_answers ORDER BY msg_id")]
    assert [reply["outcome"] for reply in replies] == ["CANCELED", "SUCCESS"]
    assert replies[0]["error"]["message"] == "canceled by ann: a duplicate"
    assert replies[1]["result"] == {"by": "hand"}
    for name, event in (("a", "OPERATOR_CANCEL"), ("b", "OPERATOR_COMPLETE")):
        last = orders.get_audit_trail("orders", name)[-1]
        assert last.event.value == event
    assert last.details == {"operator": "bob", "reason": "done by phone"}
    assert queue_length(db) == 0


def test_every_other_state_is_refused_and_nothing_changes(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=name) for name in ("done", "failed", "running")])
    done, failed, _ = orders.claim()
    orders.settle([done.complete(None), fail(failed, BusinessRuleException())])
    orders.send("orders", "Ship", command_id="waiting")
    orders.send("orders", "Ship", command_id="canceled")
    orders.cancel("orders", "canceled")
    before = snapshot(db)
    tsq = orders.tsq
    for command_id, said in [
        ("done", "it is COMPLETED, and that is final"),
        ("failed", "it is FAILED, and that is final"),
        ("canceled", "it is CANCELED, and that is final"),
        ("running", r"worker \S+ holds it \(its lease ends at \d"),
        ("waiting", "it is waiting in the queue"),
    ]:
        for act in (tsq.operator_retry, tsq.operator_cancel, tsq.operator_complete):
            with pytest.raises(InvalidOperationError, match=f"command '{command_id}' of domain 'orders': {said}"):
                act("orders", command_id)
    for act in (tsq.operator_retry, tsq.operator_cancel, tsq.operator_complete):
        with pytest.raises(CommandNotFoundError, match="no command 'unknown' in domain 'orders'"):
            act("orders", "unknown")
    assert snapshot(db) == before


def test_in_bulk(orders: Bus, db: psycopg.Connection[Any]) -> None:
    _trouble(orders, "a1", "a2", "a3", code="X")
    _trouble(orders, "b1", command_type="Pack", code="X")
    _trouble(orders, "c1", "c2", code="Y")
    assert orders.tsq.retry_all("orders", "Ship", error_code="X", operator="ann", reason="all") == 3
    assert queue_length(db) == 3
    assert orders.tsq.cancel_all("orders", error_code="Y", operator="bob") == 2
    assert orders.tsq.complete_all("orders", result=[1], operator="cy") == 1
    assert orders.tsq.retry_all("orders") == 0
    assert [orders.get_command("orders", name).status.value for name in ("a1", "b1", "c1")] == [
        "PENDING",
        "COMPLETED",
        "CANCELED",
    ]
    assert orders.get_command("orders", "b1").result == [1]
    actions = db.execute(
        "SELECT action, operator, count(*) FROM commandbus.operator_action GROUP BY 1, 2 ORDER BY 2"
    )
    assert actions.fetchall() == [("RETRY", "ann", 3), ("CANCEL", "bob", 2), ("COMPLETE", "cy", 1)]


def test_bulk_in_bites(orders: Bus) -> None:
    from commandbus.flow.commands import operate

    _trouble(orders, *(f"k{n}" for n in range(25)))
    selection, operator_action = operate.Selection("orders"), operate.operator_action("ann", action="CANCEL")
    bites = [len(orders.run(operate.act(selection, operator_action, limit=10))) for _ in range(4)]
    assert bites == [10, 10, 5, 0]


def test_what_comes_back_during_a_bulk_retry_is_not_retried_again(orders: Bus) -> None:
    """A command that fails at once must not be retried by one act for ever."""
    from commandbus.flow.commands import operate

    _trouble(orders, "a", "b")
    plan = operate.act_on_all(operate.Selection("orders"), operate.operator_action("ann", action="RETRY"))
    operation: Any = next(plan)
    moved = []
    try:
        while True:
            answer = orders.run(operation)
            if isinstance(answer, list):
                moved += answer
                for attempt in orders.claim():
                    orders.settle(fail(attempt, PermanentCommandError()))
            operation = plan.send(answer)
    except StopIteration as stop:
        count = stop.value
    assert count == 2
    assert sorted(moved) == ["a", "b"]
    assert orders.tsq.count() == 2


@sync_only
def test_of_two_operators_one_wins(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """For real, on connections of their own, in every pair of deeds."""
    operator_actions: dict[str, Callable[[TroubleshootingQueue, str], None]] = {
        "RETRY": lambda tsq, name: tsq.operator_retry("orders", name, operator="r"),
        "CANCEL": lambda tsq, name: tsq.operator_cancel("orders", name, operator="c"),
        "COMPLETE": lambda tsq, name: tsq.operator_complete("orders", name, operator="d"),
    }
    pairs = [(x, y) for x in operator_actions for y in operator_actions] * 3
    names = [f"k{n}" for n in range(len(pairs))]
    _trouble(orders, *names)
    with CommandBus(orders.url) as one_bus, CommandBus(orders.url) as other_bus:
        first, second = TroubleshootingQueue(one_bus), TroubleshootingQueue(other_bus)
        first.count()
        second.count()
        for name, (x, y) in zip(names, pairs, strict=True):
            answers = at_once(
                [
                    lambda name=name, x=x: operator_actions[x](first, name),
                    lambda name=name, y=y: operator_actions[y](second, name),
                ]
            )
            assert answers.count(None) == 1, answers
            (refused,) = [answer for answer in answers if answer is not None]
            assert isinstance(refused, InvalidOperationError), refused
    assert one(db, "SELECT count(*) FROM commandbus.operator_action") == len(pairs)
    assert (
        one(db, "SELECT max(n) FROM (SELECT count(*) n FROM commandbus.operator_action GROUP BY command) x") == 1
    )
    retried = one(db, "SELECT count(*) FROM commandbus.operator_action WHERE action = 'RETRY'")
    assert queue_length(db) == retried


@sync_only
def test_the_second_operator_waits_for_the_first(orders: Bus, db: psycopg.Connection[Any]) -> None:
    from commandbus.flow.commands import operate

    _trouble(orders, "rolled back", "committed")
    with ThreadPoolExecutor(1) as threads:
        for name, end in (("rolled back", "rollback"), ("committed", "commit")):
            with psycopg.connect(orders.url) as conn:
                orders.run(operate.act_on("orders", name, operate.operator_action("ann", action="CANCEL")), conn)
                second = threads.submit(orders.tsq.operator_retry, "orders", name)
                wait_until_blocked(db)
                getattr(conn, end)()
                if end == "rollback":
                    assert second.result(30) is None
                else:
                    with pytest.raises(InvalidOperationError, match="CANCELED, and that is final"):
                        second.result(30)


@sync_only
def test_two_bulk_operators_share_the_work(orders: Bus, db: psycopg.Connection[Any]) -> None:
    _trouble(orders, *(f"k{n}" for n in range(100)))

    def act(verb: str) -> Any:
        with CommandBus(orders.url) as bus:
            return getattr(TroubleshootingQueue(bus), verb)("orders", operator=verb)

    answers = at_once([lambda: act("retry_all"), lambda: act("cancel_all"), lambda: act("complete_all")])
    assert sum(answers) == 100, answers  # type: ignore[arg-type]
    assert one(db, "SELECT count(*) FROM commandbus.operator_action") == 100
    assert orders.tsq.count() == 0


def test_nobody_acts_anonymously_or_with_bad_words(orders: Bus, db: psycopg.Connection[Any]) -> None:
    _trouble(orders, "k")
    before = snapshot(db)
    tsq = orders.tsq
    for operator in ("a\x00b", "x" * 256, "a\nb", 5, "\ud800"):
        for act in (tsq.operator_retry, tsq.operator_cancel, tsq.operator_complete, orders.cancel):
            with pytest.raises(InvalidCommandError, match="operator"):
                act("orders", "k", operator=operator)
        for bulk in (tsq.retry_all, tsq.cancel_all, tsq.complete_all, orders.pause):
            with pytest.raises(InvalidCommandError, match="operator"):
                bulk("orders", operator=operator)
    for reason in ("a\x00b", "x" * 10_000, 5):
        with pytest.raises(InvalidCommandError, match="reason"):
            tsq.operator_cancel("orders", "k", reason=reason)
    for result in (object(), float("nan"), "\x00", "x" * 2_000_000):
        with pytest.raises(InvalidCommandError, match="result"):
            tsq.operator_complete("orders", "k", result)
        with pytest.raises(InvalidCommandError, match="result"):
            tsq.complete_all("orders", result=result)
    for domain in ("Orders", "x; drop table y", None, 5):
        for act in (tsq.operator_retry, tsq.operator_cancel, tsq.operator_complete, orders.cancel):
            with pytest.raises(InvalidCommandError, match="domain"):
                act(domain, "k")
        for bulk in (tsq.retry_all, tsq.cancel_all, tsq.complete_all):
            with pytest.raises(InvalidCommandError, match="domain"):
                bulk(domain)
    for command_id in ("a\x00", "\ud800", None, 5, ""):
        for act in (tsq.operator_retry, tsq.operator_cancel, tsq.operator_complete, orders.cancel):
            with pytest.raises(InvalidCommandError, match="command_id"):
                act("orders", command_id)
    for command_type in ("a\x00", "\ud800", 5, ""):
        for bulk in (tsq.retry_all, tsq.cancel_all, tsq.complete_all, tsq.list, tsq.count):
            with pytest.raises(InvalidCommandError, match="command_type"):
                bulk("orders", command_type)
    assert snapshot(db) == before


# --- cancel -------------------------------------------------------------------------------------------------


def test_cancel_what_waits(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_queue("answers")
    orders.send("orders", "Ship", command_id="ready", reply_to="answers", correlation_id="c")
    orders.send("orders", "Ship", command_id="delayed", delay=600)
    orders.send("orders", "Pack", command_id="parked")
    orders.pause("orders", "Pack")
    assert [attempt.command_id for attempt in orders.claim()] == ["ready"]
    orders.settle(fail(_running(orders, db, "ready"), ValueError("first")), "w2")
    assert orders.get_command("orders", "parked").waiting_for == "pause"
    for name in ("ready", "delayed", "parked"):
        orders.cancel("orders", name, operator="ann", reason="not needed")
        record = orders.get_command("orders", name)
        assert record.status is CommandStatus.CANCELED
        assert record.finished_at is not None
        assert record.waiting_for is None
        last = orders.get_audit_trail("orders", name)[-1]
        assert last.event.value == "OPERATOR_CANCEL"
        assert last.details == {"operator": "ann", "reason": "not needed"}
    assert queue_length(db) == 0
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert orders.get_command("orders", "ready").attempts == 2
    reply = one(db, "SELECT message FROM pgmq.q_answers")
    assert (reply["outcome"], reply["command_id"], reply["correlation_id"]) == ("CANCELED", "ready", "c")
    assert orders.resume("orders", "Pack") == 0


def _running(bus: Bus, db: psycopg.Connection[Any], command_id: str) -> Any:
    expire_leases(db)
    (attempt,) = [attempt for attempt in bus.claim("w2") if attempt.command_id == command_id]
    return attempt


def test_cancel_is_refused_otherwise(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=name) for name in ("done", "failed", "tsq")])
    done, failed, troubled = orders.claim()
    orders.settle(
        [done.complete(None), fail(failed, BusinessRuleException()), fail(troubled, PermanentCommandError())]
    )
    before = snapshot(db)
    for command_id, said in [
        ("done", "COMPLETED, and that is final"),
        ("failed", "FAILED, and that is final"),
        ("tsq", "it is in the troubleshooting queue"),
    ]:
        with pytest.raises(InvalidOperationError, match=said):
            orders.cancel("orders", command_id)
    with pytest.raises(CommandNotFoundError, match="no command 'unknown'"):
        orders.cancel("orders", "unknown")
    assert snapshot(db) == before


def test_a_canceled_command_cannot_be_canceled_or_claimed(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    orders.cancel("orders", "k")
    with pytest.raises(InvalidOperationError, match="CANCELED, and that is final"):
        orders.cancel("orders", "k")
    assert orders.claim() == []
    assert not orders.send("orders", "Ship", command_id="k").created


@sync_only
def test_cancel_races_with_claim(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """Either it was canceled and nobody runs it, or it runs and was asked to stop."""
    rounds = 40
    with CommandBus(orders.url) as canceler:
        canceler.list_domains()
        outcomes = set()
        for n in range(rounds):
            orders.send("orders", "Ship", command_id=f"k{n}")
            claimed, canceled = at_once([orders.claim, lambda n=n: canceler.cancel("orders", f"k{n}")])
            assert isinstance(claimed, list)
            outcomes.add(len(claimed))
            if claimed:
                assert canceled is CancelResult.REQUESTED
                assert orders.settle(claimed[0].complete(None)) == {}
            else:  # the claim skipped the row that the cancel had locked, or came too late
                assert canceled is CancelResult.CANCELED
    assert queue_length(db) == 0
    statuses = one(db, "SELECT count(*) FROM commandbus.command WHERE status IN ('COMPLETED', 'CANCELED')")
    assert statuses == rounds
