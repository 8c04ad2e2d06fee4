"""Cancelling what runs: a request in the held row that no outcome but completion can pass by."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
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
    CancelRequest,
    CancelResult,
    CommandBus,
    CommandStatus,
    InvalidOperationError,
    NewCommand,
    PermanentCommandError,
)
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.renew import PendingCancel, pending_cancels, renew
from commandbus.flow.commands.settle import Settlement, cancellation
from commandbus.model.outcome import Judgement, Verdict
from commandbus.worker.execution.attempt import Attempt

Db = psycopg.Connection[Any]


def _canceled(attempt: Attempt) -> Settlement:
    """What a worker settles when it has stopped an attempt that somebody asked to cancel."""
    return attempt.fail(Judgement(Verdict.CANCELED, cancellation("ann", "not needed")))


def _fence(attempt: Attempt) -> tuple[int, int]:
    return attempt.msg_id, attempt.read_ct


def _ask(bus: Bus, command_id: str = "k") -> Any:
    return bus.cancel("orders", command_id, operator="ann", reason="not needed")


def _events(bus: Bus, command_id: str = "k") -> list[tuple[str, int | None]]:
    return [(entry.event.value, entry.attempt) for entry in bus.get_audit_trail("orders", command_id)]


OTHER_OUTCOMES: dict[str, Callable[[Attempt], Settlement]] = {
    "retry": lambda attempt: fail(attempt, ValueError("again")),
    "permanent": lambda attempt: fail(attempt, PermanentCommandError("no")),
    "business rule": lambda attempt: fail(attempt, BusinessRuleException("no")),
    "given back": lambda attempt: attempt.give_back(),
}


# --- the request --------------------------------------------------------------------------------------------


def test_the_request_is_written_where_the_command_is_held(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="k")
    attempt = orders.claim_one()
    db.execute("LISTEN commandbus_orders")
    assert _ask(orders) is CancelResult.REQUESTED
    (told,) = db.notifies(timeout=5, stop_after=1)
    assert told.payload == f"cancel {attempt.msg_id}"
    headers = one(db, "SELECT headers FROM pgmq.q_orders__commands")
    assert headers["held_by"] == "w1"
    assert {**headers["cancel"], "at": None} == {"by": "ann", "reason": "not needed", "at": None}
    record = orders.get_command("orders", "k")
    assert (record.status, record.worker) == (CommandStatus.IN_PROGRESS, "w1")
    request = record.cancel_requested
    assert request == CancelRequest("ann", "not needed", request.at)
    assert abs(request.at - datetime.now(UTC)) < timedelta(minutes=1)
    actions = db.execute("SELECT action, operator, reason, attempt FROM commandbus.operator_action").fetchall()
    assert actions == [("CANCEL", "ann", "not needed", 1)]
    assert _events(orders) == [("SENT", None), ("RECEIVED", 1), ("OPERATOR_CANCEL", 1)]
    assert orders.query_commands(status="IN_PROGRESS").items[0].cancel_requested == request


def test_a_second_request_changes_nothing(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="k")
    orders.claim_one()
    _ask(orders)
    before = snapshot(db)
    assert orders.cancel("orders", "k", operator="bob") is CancelResult.REQUESTED
    assert snapshot(db) == before


def test_what_nobody_has_started_is_canceled_at_once(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    assert _ask(orders) is CancelResult.CANCELED
    record = orders.get_command("orders", "k")
    assert (record.status, record.cancel_requested) == (CommandStatus.CANCELED, None)


def test_the_holder_is_told(orders: Bus) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=name) for name in ("a", "k", "z")])
    attempts = orders.claim()
    assert orders.run(pending_cancels("orders", "w1", attempts)) == []
    assert orders.run(renew("orders", "w1", attempts, lease_seconds=30)).canceled == []
    _ask(orders)
    told = [PendingCancel(*_fence(attempts[1]), "ann", "not needed")]
    assert orders.run(pending_cancels("orders", "w1", attempts)) == told
    for _ in range(2):
        renewal = orders.run(renew("orders", "w1", attempts, lease_seconds=30))
        assert (renewal.lost, renewal.canceled) == ([], told)
    assert orders.run(pending_cancels("orders", "w2", attempts)) == []
    assert orders.run(pending_cancels("orders", "w1", [attempts[1].fence._replace(read_ct=2)])) == []
    assert orders.run(pending_cancels("orders", "w1", [])) == []


def test_an_operator_who_tries_something_else_is_told_too(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    orders.claim_one()
    with pytest.raises(InvalidOperationError, match=r"worker w1 holds it \(its lease ends at \d[^)]*renewed\)$"):
        orders.tsq.operator_cancel("orders", "k")
    _ask(orders)
    with pytest.raises(InvalidOperationError, match=r"worker w1 holds it .*, and ann has asked to cancel it$"):
        orders.tsq.operator_retry("orders", "k")


# --- how it ends --------------------------------------------------------------------------------------------


def test_it_may_complete_within_its_grace(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="k")
    attempt = orders.claim_one()
    _ask(orders)
    assert orders.settle(attempt.complete('"done"')) == {}
    record = orders.get_command("orders", "k")
    assert (record.status, record.result, record.cancel_requested) == (CommandStatus.COMPLETED, "done", None)
    assert _events(orders) == [("SENT", None), ("RECEIVED", 1), ("OPERATOR_CANCEL", 1), ("COMPLETED", 1)]


@pytest.mark.parametrize("outcome", OTHER_OUTCOMES)
@pytest.mark.parametrize("waiting", [False, True])
def test_no_other_outcome_passes_by_the_request(orders: Bus, db: Db, outcome: str, waiting: bool) -> None:
    orders.create_queue("answers")
    orders.send("orders", "Ship", command_id="k", reply_to="answers")
    attempt = orders.claim_one()
    _ask(orders)
    before = snapshot(db)
    refused = orders.settle(OTHER_OUTCOMES[outcome](attempt), waiting=waiting)
    assert refused == {_fence(attempt): "canceled"}
    assert snapshot(db) == before
    assert orders.settle(_canceled(attempt), waiting=waiting) == {}
    record = orders.get_command("orders", "k")
    assert (record.status, record.error) == (CommandStatus.CANCELED, "canceled by ann: not needed")
    assert (record.attempts, record.worker, record.cancel_requested) == (1, "w1", None)
    assert queue_length(db) == 0
    assert one(db, "SELECT message ->> 'outcome' FROM pgmq.q_answers") == "CANCELED"
    assert _events(orders) == [("SENT", None), ("RECEIVED", 1), ("OPERATOR_CANCEL", 1), ("CANCELED", 1)]
    with pytest.raises(InvalidOperationError, match="CANCELED, and that is final"):
        _ask(orders)


def test_its_neighbours_in_a_batch_are_settled(orders: Bus) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=name) for name in ("a", "k", "z")])
    first, asked, last = orders.claim()
    _ask(orders)
    batch = [first.complete(None), fail(asked, ValueError()), fail(last, ValueError())]
    assert orders.settle(batch) == {_fence(asked): "canceled"}
    statuses = [orders.get_command("orders", name).status.value for name in ("a", "k", "z")]
    assert statuses == ["COMPLETED", "IN_PROGRESS", "PENDING"]


def test_the_next_attempt_knows_of_no_request(orders: Bus) -> None:
    """Nothing is left of one when a command completed in spite of it, was retried by hand and sent again."""
    orders.send("orders", "Ship", command_id="k", max_attempts=1)
    orders.settle(fail(orders.claim_one(), ValueError()))
    orders.tsq.operator_retry("orders", "k")
    assert orders.get_command("orders", "k").cancel_requested is None
    attempt = orders.claim_one()
    assert _ask(orders) is CancelResult.REQUESTED
    assert _events(orders)[-2:] == [("RECEIVED", 2), ("OPERATOR_CANCEL", 2)]
    assert orders.settle(_canceled(attempt)) == {}


# --- a worker that vanished ---------------------------------------------------------------------------------


@pytest.mark.parametrize("paused", [False, True])
def test_it_does_not_run_again_after_its_worker_vanished(orders: Bus, db: Db, paused: bool) -> None:
    orders.create_queue("answers")
    orders.send("orders", "Ship", command_id="k", reply_to="answers", correlation_id="c")
    lost = orders.claim_one()
    _ask(orders)
    if paused:
        orders.pause("orders", "Ship")
    expire_leases(db)
    assert orders.claim("w2") == []
    record = orders.get_command("orders", "k")
    assert (record.status, record.error, record.attempts) == (
        CommandStatus.CANCELED,
        "canceled by ann: not needed",
        2,
    )
    assert record.finished_at is not None
    assert queue_length(db) == 0
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    attempts = [(made.number, made.verdict, made.worker) for made in orders.get_attempts("orders", "k")]
    assert attempts == [(1, "LOST", "w1"), (2, "CANCELED", "w2")]
    assert _events(orders) == [
        ("SENT", None),
        *(("RECEIVED", 1), ("OPERATOR_CANCEL", 1), ("FAILED", 1)),
        ("CANCELED", 2),
    ]
    (reply,) = [row[0] for row in db.execute("SELECT message FROM pgmq.q_answers")]
    assert (reply["outcome"], reply["correlation_id"]) == ("CANCELED", "c")
    assert reply["error"] == {
        "type": "OperatorCancel",
        "code": "CANCELED",
        "message": "canceled by ann: not needed",
    }
    assert orders.settle(lost.complete(None)) == {_fence(lost): "refused"}


def test_nor_after_the_one_who_found_it_vanished_as_well(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="k")
    orders.claim_one()
    _ask(orders)
    expire_leases(db)
    assert len(orders.claim_raw("w2").odd) == 1
    expire_leases(db)
    assert orders.claim("w3") == []
    assert orders.get_command("orders", "k").status is CommandStatus.CANCELED
    attempts = [(made.number, made.verdict, made.worker) for made in orders.get_attempts("orders", "k")]
    assert attempts == [(1, "LOST", "w1"), (2, "LOST", "w2"), (3, "CANCELED", "w3")]


@pytest.mark.parametrize("kind", ["lost", "paused"])
def test_a_request_between_the_claim_and_what_is_put_right(orders: Bus, db: Db, kind: str) -> None:
    orders.send("orders", "Ship", command_id="k")
    if kind == "lost":
        orders.claim_one()
        expire_leases(db)
    else:
        orders.pause("orders", "Ship")
    found = orders.claim_raw("w2")
    assert _ask(orders) is CancelResult.REQUESTED
    assert orders.put_right(found, "w2") == ([], 0)
    assert orders.get_command("orders", "k").status is CommandStatus.CANCELED
    assert queue_length(db) == 0
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0


def test_others_that_were_lost_run_on(orders: Bus, db: Db) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=name) for name in ("a", "k", "z")])
    orders.claim()
    _ask(orders)
    expire_leases(db)
    assert [attempt.command_id for attempt in orders.claim("w2")] == ["a", "z"]


# --- races --------------------------------------------------------------------------------------------------


@sync_only
def test_cancel_waits_for_a_claim_in_flight(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="k")
    with psycopg.connect(orders.url) as claiming, ThreadPoolExecutor(1) as threads:
        orders.run(claim(domain="orders", worker="w1", n=1, lease_seconds=30, cursor=None), claiming)
        asked = threads.submit(_ask, orders)
        wait_until_blocked(db)
        claiming.commit()
        assert asked.result(30) is CancelResult.REQUESTED
    assert orders.get_command("orders", "k").cancel_requested is not None


@sync_only
@pytest.mark.parametrize("outcome", ["complete", "retry", "permanent"])
def test_cancel_waits_for_a_settlement_in_flight(orders: Bus, db: Db, outcome: str) -> None:
    orders.send("orders", "Ship", command_id="k")
    attempt = orders.claim_one()
    settlement = attempt.complete(None) if outcome == "complete" else OTHER_OUTCOMES[outcome](attempt)
    with psycopg.connect(orders.url) as settling, ThreadPoolExecutor(1) as threads:
        assert orders.settle(settlement, conn=settling) == {}
        asked = threads.submit(_ask, orders)
        wait_until_blocked(db)
        settling.commit()
        if outcome == "retry":
            assert asked.result(30) is CancelResult.CANCELED, "it waits for its next attempt"
        else:
            said = "COMPLETED, and that is final" if outcome == "complete" else "in the troubleshooting queue"
            with pytest.raises(InvalidOperationError, match=said):
                asked.result(30)
    after = {"complete": "COMPLETED", "retry": "CANCELED", "permanent": "IN_TROUBLESHOOTING_QUEUE"}
    assert orders.get_command("orders", "k").status.value == after[outcome]
    assert queue_length(db) == 0


@sync_only
def test_a_settlement_meets_a_cancel_in_flight(orders: Bus, db: Db) -> None:
    """It is busy until that is decided; one that waits sees the request."""
    orders.send("orders", "Ship", command_id="k")
    attempt = orders.claim_one()
    again = fail(attempt, ValueError())
    with psycopg.connect(orders.url) as asking, ThreadPoolExecutor(1) as threads:
        orders.cancel("orders", "k", operator="ann", conn=asking)
        assert orders.settle(again) == {_fence(attempt): "busy"}
        renewal = orders.run(renew("orders", "w1", [attempt], lease_seconds=60))
        assert (renewal.lost, renewal.canceled) == ([], [])
        waiting = threads.submit(orders.settle, again, waiting=True)
        wait_until_blocked(db)
        asking.commit()
        assert waiting.result(30) == {_fence(attempt): "canceled"}
    assert orders.settle(_canceled(attempt)) == {}


@sync_only
def test_cancel_waits_for_a_parking_in_flight(orders: Bus, db: Db) -> None:
    from commandbus.flow.commands.claim import put_right

    orders.send("orders", "Ship", command_id="k")
    orders.pause("orders", "Ship")
    found = orders.claim_raw()
    with psycopg.connect(orders.url) as parking, ThreadPoolExecutor(1) as threads:
        orders.run(put_right(domain="orders", worker="w1", odd=found.odd, max_bytes=9999), parking)
        asked = threads.submit(_ask, orders)
        wait_until_blocked(db)
        parking.commit()
        assert asked.result(30) is CancelResult.CANCELED
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert orders.resume("orders", "Ship") == 0


@sync_only
@pytest.mark.parametrize("outcome", ["complete", "retry"])
def test_cancel_races_with_settle(orders: Bus, db: Db, outcome: str) -> None:
    """Exactly one of them decides, and the command agrees with what both were told."""
    with CommandBus(orders.url) as canceler:
        canceler.list_domains()
        for n in range(40):
            name = f"k{n}"
            orders.send("orders", "Ship", command_id=name)
            attempt = orders.claim_one()
            item = attempt.complete(None) if outcome == "complete" else OTHER_OUTCOMES["retry"](attempt)
            settled, asked = at_once(
                [
                    lambda item=item: orders.settle(item, waiting=True),
                    lambda name=name: canceler.cancel("orders", name, operator="ann"),
                ]
            )
            if outcome == "complete":
                assert settled == {}, "completion wins, whoever came first"
                assert asked is CancelResult.REQUESTED or isinstance(asked, InvalidOperationError)
                expected = CommandStatus.COMPLETED
            elif settled == {}:
                assert asked is CancelResult.CANCELED
                expected = CommandStatus.CANCELED
            else:
                assert settled == {_fence(attempt): "canceled"}
                assert asked is CancelResult.REQUESTED
                assert orders.settle(_canceled(attempt)) == {}
                expected = CommandStatus.CANCELED
            assert orders.get_command("orders", name).status is expected
    assert queue_length(db) == 0


@sync_only
def test_two_cancels_at_once_are_one_request(orders: Bus, db: Db) -> None:
    with CommandBus(orders.url) as first, CommandBus(orders.url) as second:
        first.list_domains()
        second.list_domains()
        for n in range(30):
            name = f"k{n}"
            orders.send("orders", "Ship", command_id=name)
            attempt = orders.claim_one()
            answers = at_once(
                [
                    lambda name=name: first.cancel("orders", name, operator="ann"),
                    lambda name=name: second.cancel("orders", name, operator="bob"),
                ]
            )
            assert answers == [CancelResult.REQUESTED] * 2
            who = one(db, "SELECT operator FROM commandbus.operator_action WHERE command = %s", attempt.id)
            assert orders.get_command("orders", name).cancel_requested.by == who
            assert orders.settle(_canceled(attempt)) == {}
    assert one(db, "SELECT count(*) FROM commandbus.operator_action") == 30


# --- progress -----------------------------------------------------------------------------------------------


def test_progress_travels_with_a_renewal_and_stays(orders: Bus, db: Db) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=name) for name in ("a", "k")])
    attempts = orders.claim()

    def told() -> list[Any]:
        return [orders.get_command("orders", name).progress for name in ("a", "k")]

    assert told() == [None, None]
    text = '{"done": 3, "of": 7, "note": "ü \\" %s"}'
    progress = {attempts[1].msg_id: text, 999_999: "1"}
    assert orders.run(renew("orders", "w1", attempts, lease_seconds=30, progress=progress)).lost == []
    assert told() == [None, {"done": 3, "of": 7, "note": 'ü " %s'}]
    assert orders.run(renew("orders", "w1", attempts, lease_seconds=30)).lost == []
    assert told()[1] == {"done": 3, "of": 7, "note": 'ü " %s'}
    _ask(orders)
    orders.run(renew("orders", "w1", attempts, lease_seconds=30, progress={attempts[1].msg_id: "0.75"}))
    record = orders.get_command("orders", "k")
    assert (record.progress, record.cancel_requested.by) == (0.75, "ann")
    assert one(db, "SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands LIMIT 1") == "w1"
    orders.run(renew("orders", "w2", attempts, lease_seconds=30, progress={attempts[0].msg_id: "1"}))
    assert told()[0] is None, "not who holds it"
    assert orders.settle([attempt.complete(None) for attempt in attempts]) == {}
    assert told() == [None, None]
