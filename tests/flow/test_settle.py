"""settle: every outcome, once, under its fence; what is refused or busy changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
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
    CommandBus,
    CommandStatus,
    NewCommand,
    PermanentCommandError,
    TransientCommandError,
    UnknownCommandTypeError,
)
from commandbus.db.drivers import run
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.renew import renew
from commandbus.flow.commands.settle import settle, settle_done, settle_one
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt


def _sent(orders: Bus, command_id: str = "k", **more: Any) -> Attempt:
    orders.send("orders", "Ship", {"n": 1}, command_id=command_id, **more)
    return orders.claim_one()


def test_completed(orders: Bus, db: psycopg.Connection[Any]) -> None:
    attempt = _sent(orders)
    assert orders.settle(attempt.complete('{"answer": [42, "ü"]}')) == {}
    record = orders.get_command("orders", "k")
    assert (record.status, record.result) == (CommandStatus.COMPLETED, {"answer": [42, "ü"]})
    assert (record.attempts, record.worker, record.error) == (1, "w1", None)
    assert record.created_at <= record.started_at <= record.finished_at
    assert queue_length(db) == 0
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0


def test_completed_without_a_result(orders: Bus) -> None:
    attempt = _sent(orders)
    orders.settle(attempt.complete(None))
    assert orders.get_command("orders", "k").result is None


def test_a_transient_failure_is_tried_again_later(orders: Bus, db: psycopg.Connection[Any]) -> None:
    attempt = _sent(orders)
    policy = RetryPolicy(backoff_schedule=[60], jitter=0)
    error = TransientCommandError("busy: ☃", code="HTTP_503", details={"after": 5})
    assert orders.settle(fail(attempt, error, policy=policy)) == {}
    record = orders.get_command("orders", "k")
    assert (record.status, record.attempts, record.worker) == (CommandStatus.PENDING, 1, None)
    assert (record.error_type, record.error_code, record.error) == ("TransientCommandError", "HTTP_503", "busy: ☃")
    row = db.execute(
        "SELECT number, verdict, worker, error_type, error_code, error, details, retry_at - finished_at, "
        "started_at IS NOT NULL FROM commandbus.attempt"
    ).fetchall()
    assert row == [
        (
            1,
            "RETRY",
            "w1",
            "TransientCommandError",
            "HTTP_503",
            "busy: ☃",
            {"after": 5},
            timedelta(seconds=60),
            True,
        )
    ]
    assert orders.claim() == []
    db.execute("UPDATE pgmq.q_orders__commands SET vt = vt - interval '61s'")
    again = orders.claim_one("w2")
    assert (again.number, again.charge) == (2, 2)
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 1, "nobody vanished"


def test_used_up_attempts_go_to_the_troubleshooting_queue(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k", max_attempts=2)
    for n in (1, 2):
        attempt = orders.claim_one()
        orders.settle(fail(attempt, ValueError(f"no {n}")))
    record = orders.get_command("orders", "k")
    assert (record.status, record.attempts) == (CommandStatus.IN_TROUBLESHOOTING_QUEUE, 2)
    assert (record.finished_at, record.error) == (None, "no 2")
    (entry,) = orders.tsq.list()
    assert (entry.command_id, entry.attempt, entry.error_type, entry.error) == ("k", 2, "ValueError", "no 2")
    assert queue_length(db) == 0
    verdicts = db.execute("SELECT number, verdict FROM commandbus.attempt ORDER BY number").fetchall()
    assert verdicts == [(1, "RETRY"), (2, "EXHAUSTED")]


@pytest.mark.parametrize(
    ("error", "verdict", "status", "code"),
    [
        (PermanentCommandError("x", code="GONE"), "PERMANENT", "IN_TROUBLESHOOTING_QUEUE", "GONE"),
        (
            UnknownCommandTypeError("orders", "Ship"),
            "UNKNOWN_TYPE",
            "IN_TROUBLESHOOTING_QUEUE",
            "UNKNOWN_COMMAND_TYPE",
        ),
        (BusinessRuleException("x", code="NO_CREDIT"), "BUSINESS_RULE", "FAILED", "NO_CREDIT"),
    ],
    ids=["permanent", "unknown", "business"],
)
def test_final_failures(
    orders: Bus, db: psycopg.Connection[Any], error: Exception, verdict: str, status: str, code: str
) -> None:
    attempt = _sent(orders)
    assert orders.settle(fail(attempt, error)) == {}
    record = orders.get_command("orders", "k")
    assert (record.status.value, record.error_code, record.attempts) == (status, code, 1)
    assert db.execute("SELECT number, verdict FROM commandbus.attempt").fetchall() == [(1, verdict)]
    assert queue_length(db) == 0
    assert orders.tsq.count() == (status == "IN_TROUBLESHOOTING_QUEUE")
    assert (record.finished_at is None) == (status == "IN_TROUBLESHOOTING_QUEUE")


def test_canceled_while_running(orders: Bus, db: psycopg.Connection[Any]) -> None:
    attempt = _sent(orders)
    judgement = Judgement(Verdict.CANCELED, Failure("Canceled", "CANCELED", "asked to"))
    assert orders.settle(attempt.fail(judgement)) == {}
    assert orders.get_command("orders", "k").status is CommandStatus.CANCELED
    assert queue_length(db) == 0
    assert [entry.event.value for entry in orders.get_audit_trail("orders", "k")] == [
        "SENT",
        "RECEIVED",
        "CANCELED",
    ]


def test_given_back_is_not_charged(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k", max_attempts=1)
    for n in (1, 2, 3):
        attempt = orders.claim_one(f"w{n}")
        assert (attempt.number, attempt.charge) == (n, 1)
        assert orders.settle(attempt.give_back(), f"w{n}") == {}
    verdicts = db.execute("SELECT number, verdict, started_at FROM commandbus.attempt ORDER BY number").fetchall()
    assert verdicts == [(n, "GIVEN_BACK", None) for n in (1, 2, 3)]
    attempt = orders.claim_one()
    assert (attempt.number, attempt.charge) == (4, 1)
    orders.settle(fail(attempt, ValueError()))
    assert orders.get_command("orders", "k").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE


def test_who_is_given_back_all_day_does_not_fill_the_history(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k", max_attempts=1)
    for _ in range(100):
        attempt = orders.claim_one()
        assert attempt.charge == 1
        assert orders.settle(attempt.give_back("there is no room")) == {}
    rows = [row[0] for row in db.execute("SELECT number FROM commandbus.attempt ORDER BY number").fetchall()]
    assert rows == [*range(1, 11), 17, 27, 42, 65, 99], "each at half as many more"
    orders.settle(orders.claim_one().give_back("another reason"))
    assert one(db, "SELECT max(number) FROM commandbus.attempt") == 101, "a new reason is noted at once"


def _all_outcomes(attempt: Attempt) -> list[Any]:
    return [
        attempt.complete('"late"'),
        fail(attempt, ValueError("late")),
        fail(attempt, BusinessRuleException("late")),
        fail(attempt, PermanentCommandError("late")),
        attempt.give_back(),
    ]


def _wrong_read_ct(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    attempt.read_ct += 1
    attempt.row = (attempt.row[0], attempt.read_ct, *attempt.row[2:])


def _other_worker(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    db.execute('UPDATE pgmq.q_orders__commands SET headers = headers || \'{"held_by": "other"}\'')


def _retried(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    orders.settle(fail(attempt, ValueError(), policy=RetryPolicy(backoff_schedule=[60])))


def _given_back(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    orders.settle(attempt.give_back())


def _settled(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    orders.settle(attempt.complete('"first"'))


def _troubled(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    orders.settle(fail(attempt, PermanentCommandError()))


def _troubled_and_retried(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    orders.settle(fail(attempt, PermanentCommandError()))
    orders.tsq.operator_retry("orders", "k")
    orders.claim_one()


def _taken(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    expire_leases(db)
    orders.claim_one("w2")


def _taken_by_the_same(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    expire_leases(db)
    orders.claim_one("w1")


def _handed_out_again(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    """After a failover that lost commits: the same msg_id and read_ct and holder, another command."""
    other = orders.send("orders", "Ship", command_id="other")
    db.execute("DELETE FROM pgmq.q_orders__commands WHERE msg_id = %s", (attempt.msg_id + 1,))
    message = f'{{"command": {other.id}}}'
    db.execute("UPDATE pgmq.q_orders__commands SET message = %s WHERE msg_id = %s", (message, attempt.msg_id))


def _handed_out_again_with_its_number(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    """After a failover that lost more: another command has the number of the lost one, too."""
    db.execute(
        "UPDATE commandbus.command SET command_id = 'other', created_at = created_at + interval '1 microsecond'"
    )


def _without_its_command_row(orders: Bus, db: psycopg.Connection[Any], attempt: Attempt) -> None:
    db.execute("UPDATE commandbus.command SET msg_id = msg_id + 1000")


@pytest.mark.parametrize(
    "lose",
    [
        _handed_out_again,
        _handed_out_again_with_its_number,
        _without_its_command_row,
        _wrong_read_ct,
        _other_worker,
        _retried,
        _given_back,
        _settled,
        _troubled,
        _troubled_and_retried,
        _taken,
        _taken_by_the_same,
    ],
)
def test_without_its_fence_nothing_lands(
    orders: Bus, db: psycopg.Connection[Any], lose: Callable[..., None]
) -> None:
    orders.create_queue("answers")
    attempt = _sent(orders, reply_to="answers")
    lose(orders, db, attempt)
    before = snapshot(db)
    replies = one(db, "SELECT count(*) FROM pgmq.q_answers")
    for late in _all_outcomes(attempt):
        for waiting in (False, True):
            sure = late
            if lose is _handed_out_again_with_its_number:
                sure = late.only_of(attempt.sent)  # as its settler does when it has connected again
            assert orders.settle(sure, waiting=waiting) == {(attempt.msg_id, attempt.read_ct): "refused"}
    assert snapshot(db) == before
    assert one(db, "SELECT count(*) FROM pgmq.q_answers") == replies


@pytest.mark.parametrize("lose", [_handed_out_again, _without_its_command_row, _taken, _other_worker])
def test_without_its_fence_the_usual_outcome_does_not_land(
    orders: Bus, db: psycopg.Connection[Any], lose: Callable[..., None]
) -> None:
    """Nor do its neighbors, if its command row is not there: then each is asked for by itself."""
    attempt = _sent(orders)
    attempt.started = 1.0
    lose(orders, db, attempt)
    orders.send("orders", "Ship", command_id="neighbor")
    (neighbor,) = [each for each in orders.claim() if each.command_id == "neighbor"]
    neighbor.started = 1.0
    before = snapshot(db)
    if lose is _without_its_command_row:
        with pytest.raises(psycopg.DataError, match="a command row is missing for one of 2 settlements"):
            orders.run(settle_done("orders", "w1", [attempt, neighbor]))
        assert snapshot(db) == before
    else:
        assert orders.run(settle_done("orders", "w1", [attempt])) == []
        assert snapshot(db) == before
        assert orders.run(settle_done("orders", "w1", [attempt, neighbor])) == [neighbor.id]


@pytest.mark.parametrize(
    "lose",
    [
        _handed_out_again,
        _handed_out_again_with_its_number,
        _without_its_command_row,
        _taken,
        _other_worker,
        _settled,
    ],
)
def test_without_its_fence_a_completion_in_a_transaction_is_refused(
    orders: Bus, db: psycopg.Connection[Any], lose: Callable[..., None]
) -> None:
    """The handler's transaction is rolled back then."""
    attempt = _sent(orders)
    attempt.started = 1.0
    lose(orders, db, attempt)
    before = snapshot(db)
    with psycopg.connect(orders.url) as conn:
        one_of_them = settle_one("orders", "w1", attempt, read_ct=attempt.read_ct, number=1, result=None)
        assert run(conn, one_of_them) == {(attempt.msg_id, attempt.read_ct): "refused"}
        conn.rollback()
    assert snapshot(db) == before


def test_a_busy_or_canceled_row_of_the_same_command_is_not_refused(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    """Also if the command is named by when it was sent."""
    attempt = _sent(orders)
    key = (attempt.msg_id, attempt.read_ct)
    for outcome in (attempt.complete(None), fail(attempt, ValueError()), attempt.give_back()):
        surely = outcome.only_of(attempt.sent)
        with psycopg.connect(orders.url) as locking:
            locking.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
            assert orders.settle(surely) == {key: "busy"}
    orders.cancel("orders", "k", operator="ann")
    assert orders.settle(attempt.give_back().only_of(attempt.sent)) == {key: "canceled"}
    assert orders.settle(attempt.complete(None).only_of(attempt.sent)) == {}
    assert orders.get_command("orders", "k").status is CommandStatus.COMPLETED


def test_a_zombie_beside_its_successor_in_one_batch(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """One worker can hold both: its lease ran out, and it claimed the command again itself."""
    orders.create_queue("answers")
    zombie = _sent(orders, reply_to="answers")
    expire_leases(db)
    successor = orders.claim_one()
    answer = orders.settle([zombie.complete('"zombie"'), successor.complete('"successor"')])
    assert answer == {(zombie.msg_id, 1): "refused"}
    assert orders.get_command("orders", "k").result == "successor"
    assert [row[0]["result"] for row in db.execute("SELECT message FROM pgmq.q_answers")] == ["successor"]


def test_a_zombie_beside_its_successor_that_is_retried(orders: Bus, db: psycopg.Connection[Any]) -> None:
    zombie = _sent(orders)
    expire_leases(db)
    successor = orders.claim_one()
    answer = orders.settle([fail(zombie, ValueError("zombie")), fail(successor, ValueError("successor"))])
    assert answer == {(zombie.msg_id, 1): "refused"}
    rows = db.execute("SELECT number, verdict, error FROM commandbus.attempt ORDER BY number").fetchall()
    assert [row[:2] for row in rows] == [(1, "LOST"), (2, "RETRY")]
    assert rows[1][2] == "successor"


def test_one_attempt_twice_in_a_batch_is_settled_once(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_queue("answers")
    outcomes: dict[str, Callable[[Attempt], list[Any]]] = {
        "completed": lambda a: [a.complete('"x"'), a.complete('"x"')],
        "retried": lambda a: [fail(a, ValueError()), fail(a, ValueError())],
        "troubled": lambda a: [fail(a, PermanentCommandError()), fail(a, PermanentCommandError())],
        "mixed": lambda a: [a.complete('"x"'), fail(a, ValueError())],
    }
    for command_id, twice in outcomes.items():
        attempt = _sent(orders, command_id, reply_to="answers")
        orders.settle(twice(attempt))
        assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE command = %s", attempt.id) <= 1
        assert orders.get_command("orders", command_id).status is not CommandStatus.IN_PROGRESS
        db.execute("DELETE FROM pgmq.q_orders__commands")
    assert one(db, "SELECT count(*) FROM pgmq.q_answers WHERE message ->> 'command_id' = 'completed'") == 1


def test_a_batch_of_all_outcomes(orders: Bus, db: psycopg.Connection[Any]) -> None:
    ids = ["completed", "retried", "troubled", "refused", "failed", "given", "lost"]
    orders.send_many("orders", [NewCommand("Ship", command_id=name) for name in ids])
    by_id = {attempt.command_id: attempt for attempt in orders.claim()}
    db.execute("UPDATE pgmq.q_orders__commands SET headers = NULL WHERE msg_id = %s", (by_id["lost"].msg_id,))
    answer = orders.settle(
        [
            by_id["lost"].complete(None),
            by_id["given"].give_back(),
            by_id["failed"].complete("1"),
            fail(by_id["retried"], ValueError()),
            fail(by_id["troubled"], PermanentCommandError()),
            fail(by_id["refused"], BusinessRuleException()),
            by_id["completed"].complete("2"),
        ]
    )
    assert answer == {(by_id["lost"].msg_id, 1): "refused"}
    found = {name: orders.get_command("orders", name).status.value for name in ids}
    assert found == {
        "completed": "COMPLETED",
        "retried": "PENDING",
        "troubled": "IN_TROUBLESHOOTING_QUEUE",
        "refused": "FAILED",
        "failed": "COMPLETED",
        "given": "PENDING",
        "lost": "PENDING",
    }
    assert queue_length(db) == 3


def test_busy_while_another_transaction_holds_the_row_then_done(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=f"k{n}") for n in range(3)])
    attempts = orders.claim()
    locked = attempts[1]
    with psycopg.connect(orders.url) as other:
        other.execute("SELECT FROM pgmq.q_orders__commands WHERE msg_id = %s FOR UPDATE", (locked.msg_id,))
        answer = orders.settle([attempt.complete(None) for attempt in attempts])
        assert answer == {(locked.msg_id, locked.read_ct): "busy"}
        assert orders.get_command("orders", "k1").status is CommandStatus.IN_PROGRESS
        assert orders.settle(fail(locked, ValueError())) == {(locked.msg_id, locked.read_ct): "busy"}
    assert orders.settle(locked.complete(None)) == {}
    assert queue_length(db) == 0
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0


@sync_only
@pytest.mark.parametrize("again", [False, True], ids=["final", "again"])
@pytest.mark.parametrize("what", ["lock", "renew"])
def test_waiting_waits_for_the_row(orders: Bus, db: psycopg.Connection[Any], what: str, again: bool) -> None:
    """Also for one that a renewal has just moved: the row that is then there must go, not the one that was."""
    attempt = _sent(orders)
    settlement = fail(attempt, ValueError("x")) if again else attempt.complete('"x"')
    with psycopg.connect(orders.url) as other, ThreadPoolExecutor(1) as threads:
        if what == "lock":
            other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        else:
            other.execute("UPDATE pgmq.q_orders__commands SET vt = vt + interval '1 s'")
        settling = threads.submit(orders.settle, settlement, waiting=True)
        wait_until_blocked(db)
        assert not settling.done()
        other.commit()
        assert settling.result(30) == {}
    record = orders.get_command("orders", "k")
    assert record.status is (CommandStatus.PENDING if again else CommandStatus.COMPLETED)
    assert queue_length(db) == (1 if again else 0)
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'held_by'") == 0


@sync_only
def test_waiting_for_a_transaction_that_takes_the_row_is_refused(orders: Bus, db: psycopg.Connection[Any]) -> None:
    attempt = _sent(orders)
    before = snapshot(db)["command"]
    with psycopg.connect(orders.url) as other, ThreadPoolExecutor(1) as threads:
        other.execute('UPDATE pgmq.q_orders__commands SET read_ct = read_ct + 1, headers = \'{"held_by": "w2"}\'')
        settling = threads.submit(orders.settle, attempt.complete('"x"'), waiting=True)
        wait_until_blocked(db)
        other.commit()
        assert settling.result(30) == {(attempt.msg_id, attempt.read_ct): "refused"}
    assert snapshot(db)["command"] == before
    assert queue_length(db) == 1


@sync_only
def test_settling_while_leases_are_renewed(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """The settler and the monitor of one worker: whatever was settled is gone from the queue."""
    orders.send_many("orders", [NewCommand("Ship") for _ in range(600)])
    attempts = orders.claim(n=600)
    stop = threading.Event()

    def renewer() -> None:
        with CommandBus(orders.url) as bus:
            lease = 60.0
            while not stop.is_set():
                lease += 1
                bus.run(renew("orders", "w1", attempts, lease_seconds=lease))

    def settler() -> None:
        try:
            with CommandBus(orders.url) as bus:
                for start in range(0, 600, 20):
                    batch = attempts[start : start + 20]
                    while batch:
                        busy = bus.run(settle("orders", "w1", [attempt.complete(None) for attempt in batch]))
                        assert set(busy.values()) <= {"busy"}
                        batch = [attempt for attempt in batch if (attempt.msg_id, attempt.read_ct) in busy]
        finally:
            stop.set()

    assert at_once([renewer, renewer, settler]) == [None, None, None]
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 600
    assert queue_length(db) == 0


@sync_only
def test_settlers_at_once_settle_once(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """Four sessions settle the same attempts in different ways: each attempt has one outcome."""
    orders.create_queue("answers")
    orders.send_many("orders", [NewCommand("Ship", reply_to="answers") for _ in range(60)])
    attempts = orders.claim(n=60)

    def settler(number: int) -> int:
        done = 0
        order = attempts if number % 2 else attempts[::-1]
        with CommandBus(orders.url) as bus:
            for start in range(0, 60, 6):
                batch = order[start : start + 6]
                outcomes = [
                    attempt.complete(f'"{number}"') if number < 2 else fail(attempt, BusinessRuleException("no"))
                    for attempt in batch
                ]
                refused = bus.run(settle("orders", "w1", outcomes, waiting=True))
                assert set(refused.values()) <= {"refused"}
                done += 6 - len(refused)
        return done

    answers: list[Any] = at_once([lambda number=number: settler(number) for number in range(4)])
    assert sum(answers) == 60, answers
    assert one(db, "SELECT count(*) FROM pgmq.q_answers") == 60
    failed = one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'FAILED'")
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == failed
    assert queue_length(db) == 0


def test_replies_are_in_the_same_transaction(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_queue("answers")
    orders.create_queue("others")
    for command_id, reply_to in (("a", "answers"), ("b", "others"), ("c", "answers"), ("d", None)):
        orders.send("orders", "Ship", command_id=command_id, reply_to=reply_to, correlation_id=f"c-{command_id}")
    a, b, c, d = orders.claim()
    refusal = BusinessRuleException("no credit", code="NO_CREDIT")
    answer = orders.settle([a.complete('{"n": 1}'), b.complete(None), fail(c, refusal), d.complete(None)])
    assert answer == {}
    messages = [row[0] for row in db.execute("SELECT message FROM pgmq.q_answers ORDER BY msg_id")]
    assert messages == [
        {
            "outcome": "SUCCESS",
            "domain": "orders",
            "command_id": "a",
            "command_type": "Ship",
            "correlation_id": "c-a",
            "result": {"n": 1},
        },
        {
            "outcome": "FAILED",
            "domain": "orders",
            "command_id": "c",
            "command_type": "Ship",
            "correlation_id": "c-c",
            "result": None,
            "error": {"type": "BusinessRuleException", "code": "NO_CREDIT", "message": "no credit"},
        },
    ]
    assert one(db, "SELECT message ->> 'command_id' FROM pgmq.q_others") == "b"
    if orders.driver == "sync":
        attempt = _sent(orders, "rolled back", reply_to="answers")
        with psycopg.connect(orders.url) as conn:
            assert orders.settle(attempt.complete(None), conn=conn) == {}
            conn.rollback()
        assert one(db, "SELECT count(*) FROM pgmq.q_answers") == 2
        assert orders.get_command("orders", "rolled back").status is CommandStatus.IN_PROGRESS


def test_no_reply_before_the_end(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_queue("answers")
    attempt = _sent(orders, reply_to="answers")
    orders.settle(fail(attempt, ValueError()))
    attempt = orders.claim_one()
    orders.settle(fail(attempt, PermanentCommandError()))
    assert one(db, "SELECT count(*) FROM pgmq.q_answers") == 0


def test_a_vanished_reply_queue_does_not_keep_a_command(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_queue("answers")
    orders.create_queue("fleeting")
    orders.send("orders", "Ship", command_id="a", reply_to="fleeting")
    orders.send("orders", "Ship", command_id="b", reply_to="answers")
    orders.send("orders", "Ship", command_id="c", reply_to="never_there")
    db.execute("SELECT pgmq.drop_queue('fleeting')")
    attempts = orders.claim()
    assert orders.settle([attempt.complete('"x"') for attempt in attempts]) == {}
    kept = db.execute(
        "SELECT queue, message ->> 'command_id', reason FROM commandbus.undelivered_reply ORDER BY queue"
    ).fetchall()
    assert [row[:2] for row in kept] == [("fleeting", "a"), ("never_there", "c")]
    assert all("does not exist" in row[2] for row in kept)
    assert one(db, "SELECT message ->> 'command_id' FROM pgmq.q_answers") == "b"
    assert all(orders.get_command("orders", name).status is CommandStatus.COMPLETED for name in "abc")


def test_a_completed_commands_row_is_updated_in_place(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """HOT: no index names what a settle changes."""
    db.execute("TRUNCATE commandbus.command")  # what an earlier test left takes room in the pages
    orders.send_many("orders", [NewCommand("Ship", {"n": n}) for n in range(200)])
    indexed = one(
        db,
        "SELECT count(*) FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid "
        "AND a.attnum = ANY (i.indkey) WHERE i.indrelid = 'commandbus.command'::regclass AND a.attname = ANY (%s)",
        ["status", "result", "attempt", "worker", "started_at", "finished_at", "waived", "msg_id", "attempt_base"],
    )
    assert indexed == 0
    orders.settle([attempt.complete('"x"') for attempt in orders.claim(n=200)])
    pages = one(db, "SELECT count(DISTINCT (ctid::text::point)[0]) FROM commandbus.command")
    assert pages <= 8


@sync_only
def test_two_sessions_settle_and_claim_without_waiting_for_each_other(orders: Bus) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(4)])
    attempts = orders.claim(n=2)
    with psycopg.connect(orders.url) as settling, CommandBus(orders.url) as bus:
        assert orders.settle([attempt.complete(None) for attempt in attempts], conn=settling) == {}
        found = bus.run(claim(domain="orders", worker="w2", n=9, lease_seconds=9, cursor=None))
        assert len(found.ready) == 2
        settling.commit()
