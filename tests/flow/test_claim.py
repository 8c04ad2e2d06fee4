"""claim: order, lease, fence; two claimers never get one row; what vanished workers leave is written down."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, at_once, expire_leases, fail, one, queue_length, sync_only

from commandbus import CommandBus, CommandStatus, NewCommand
from commandbus.flow.commands.claim import Room, claim, next_due, put_right
from commandbus.flow.commands.claimed_row import COMMAND_ID, SUSPECT
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.model.suspects import FIRST_DELAY


def test_what_is_claimed_is_what_was_sent(orders: Bus, db: psycopg.Connection[Any]) -> None:
    sent = orders.send(
        "orders", "Ship", {"n": 1}, command_id="k", correlation_id="c", max_attempts=7, headers={"h": 1}
    )
    attempt = orders.claim_one()
    command = attempt.command()
    assert (command.domain, command.command_type, command.command_id, command.id) == (
        "orders",
        "Ship",
        "k",
        sent.id,
    )
    assert (command.data, command.headers, command.correlation_id) == ({"n": 1}, {"h": 1}, "c")
    assert (attempt.number, attempt.charge, attempt.max_attempts, attempt.read_ct) == (1, 1, 7, 1)
    held_by, since = db.execute(
        "SELECT headers ->> 'held_by', (headers ->> 'since')::timestamptz FROM pgmq.q_orders__commands"
    ).fetchone() or (None, None)
    assert held_by == "w1"
    record = orders.get_command("orders", "k")
    assert (record.status, record.worker, record.attempts) == (CommandStatus.IN_PROGRESS, "w1", 1)
    assert record.started_at == since
    assert record.visible_at is None


def test_the_command_row_is_not_written_by_a_claim(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship")
    before = one(db, "SELECT (ctid, xmin)::text FROM commandbus.command")
    orders.claim_one()
    assert one(db, "SELECT (ctid, xmin)::text FROM commandbus.command") == before


def test_in_the_order_of_visibility(orders: Bus, db: psycopg.Connection[Any]) -> None:
    for n, seconds in enumerate((40, 10, 30, 20)):
        orders.send("orders", "Ship", command_id=f"{seconds}", delay=seconds)
        assert n < 4
    assert orders.claim() == []
    db.execute("UPDATE pgmq.q_orders__commands SET vt = vt - interval '100 seconds'")
    assert [orders.claim_one().command_id for _ in range(4)] == ["10", "20", "30", "40"]


def test_a_lease_hides_and_lasts(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship")
    orders.claim_one(lease=45)
    left = one(db, "SELECT vt - (headers ->> 'since')::timestamptz FROM pgmq.q_orders__commands")
    assert left == timedelta(seconds=45)
    assert orders.claim("w2") == []
    expire_leases(db)
    again = orders.claim_one("w2")
    assert (again.number, again.charge, again.read_ct) == (2, 1, 2)


def test_n_is_a_limit_and_full_says_so(orders: Bus) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(5)])
    first = orders.claim_raw(n=3)
    assert (len(first.ready), first.full) == (3, True)
    second = orders.claim_raw(n=3)
    assert (len(second.ready), second.full) == (2, False)
    third = orders.claim_raw(n=3)
    assert (third.ready, third.full, third.last_vt, third.claimed_at) == ([], False, None, None)


def test_a_cursor_leaves_out_what_became_visible_before_it(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=f"k{n}") for n in range(4)])
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - make_interval(secs => 100 - msg_id)")
    first = orders.claim_raw(n=2)
    assert first.last_vt is not None
    on_from_there = orders.claim_raw(cursor=first.last_vt)
    assert len(on_from_there.ready) == 2
    orders.settle([fail_row(row) for row in on_from_there.ready])
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 hour' WHERE headers IS NULL")
    assert orders.claim_raw(cursor=first.last_vt).ready == []
    assert len(orders.claim_raw(cursor=None).ready) == 2


def fail_row(row: tuple[Any, ...]) -> Any:
    from flow_harness import started

    from commandbus.worker.execution.attempt import Attempt

    return fail(started(Attempt("orders", row, None, 0.0)), ValueError())


def test_next_due(orders: Bus) -> None:
    assert orders.run(next_due("orders")).seconds is None
    orders.send("orders", "Ship", delay=60)
    orders.send("orders", "Ship", delay=30)
    assert 29 < orders.run(next_due("orders")).seconds <= 30
    orders.pause("orders")
    assert orders.run(next_due("orders")).seconds is None


@sync_only
def test_claimers_at_once_never_get_one_row(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(400)])

    def claimer(name: str) -> list[int]:
        got: list[int] = []
        with CommandBus(orders.url) as bus:
            while True:
                found = bus.run(claim(domain="orders", worker=name, n=7, lease_seconds=60, cursor=None))
                if not found.ready:
                    return got
                got += [row[2] for row in found.ready]

    answers: list[Any] = at_once([lambda name=name: claimer(f"w{name}") for name in range(6)])
    claimed = [id_ for answer in answers for id_ in answer]
    # SKIP LOCKED may end a claimer early; what it left is claimed by others or now.
    claimed += [attempt.id for attempt in orders.claim("late", 400)]
    assert len(claimed) == len(set(claimed)) == 400
    assert one(db, "SELECT max(read_ct) FROM pgmq.q_orders__commands") == 1


def test_a_vanished_workers_attempt_is_recorded_as_lost(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k")
    first = orders.claim_one("dead")
    expire_leases(db)
    second = orders.claim_one("w2")
    assert (second.number, second.charge) == (2, 1)
    row = db.execute(
        "SELECT number, verdict, worker, error_type, error_code, error, started_at FROM commandbus.attempt"
    ).fetchall()
    assert [found[:5] for found in row] == [(1, "LOST", "dead", "WorkerLost", "WORKER_LOST")]
    assert row[0][6].timestamp() == pytest.approx(first.started)
    assert not one(db, "SELECT headers ? 'before' FROM pgmq.q_orders__commands")
    assert orders.settle(second.complete(None), "w2") == {}
    assert orders.get_command("orders", "k").attempts == 2


def test_a_chain_of_workers_that_vanished_before_they_wrote_it_down(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    orders.send("orders", "Ship", command_id="k")
    for worker in ("dead1", "dead2", "dead3", "dead4"):
        orders.claim_raw(worker)  # and dies between the claim and put_right
        expire_leases(db)
    last = orders.claim_one("w5")
    assert (last.number, last.charge) == (5, 1)
    assert last.row[SUSPECT] == 1, "only the first of them can have started it"
    rows = db.execute("SELECT number, verdict, worker FROM commandbus.attempt ORDER BY number").fetchall()
    assert rows == [(n, "LOST", f"dead{n}") for n in (1, 2, 3, 4)]
    trail = [(entry.event.value, entry.attempt) for entry in orders.get_audit_trail("orders", "k")]
    assert trail[0] == ("SENT", None)
    assert [entry for entry in trail if entry[0] == "FAILED"] == [("FAILED", n) for n in (1, 2, 3, 4)]
    assert [entry for entry in trail if entry[0] == "RECEIVED"] == [("RECEIVED", n) for n in (1, 2, 3, 4, 5)]


def test_what_a_vanished_worker_did_not_run_is_no_suspect(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """dead1 ran the first, had only prefetched the second; dead2 claimed both after it and left no evidence."""
    orders.send("orders", "Ship", command_id="ran")
    orders.send("orders", "Ship", command_id="prefetched")
    for worker in ("dead1", "dead2"):
        orders.claim_raw(worker)
        expire_leases(db)
    found = orders.claim_raw("w3")
    ran = next(row.msg_id for row in found.odd if row.command_id == "ran")
    right, _ = orders.put_right(found, "w3", running_in={"dead1": {("orders", ran)}}.get)
    assert {(row.command_id, row.alone, row.suspect, row.waived) for row in right} == {
        ("ran", True, 1, 2),
        ("prefetched", None, None, 2),
    }
    errors = dict(
        db.execute(
            "SELECT c.command_id, min(a.error) FROM commandbus.attempt a "
            "JOIN commandbus.command c ON c.id = a.command "
            "WHERE verdict = 'LOST' GROUP BY 1 HAVING count(*) = 2 AND count(DISTINCT a.error) = 1"
        ).fetchall()
    )
    assert "its next attempt runs in a child process" in errors["ran"]
    assert "It did not run at that moment: not charged" in errors["prefetched"]


def test_putting_right_twice_changes_nothing_more(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship")
    orders.claim_raw("dead")
    expire_leases(db)
    found = orders.claim_raw("w2")
    orders.put_right(found, "w2")
    orders.put_right(found, "w2")
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 1


def test_a_late_put_right_of_a_claim_that_was_lost_does_nothing(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """w2 claimed after dead1, then hung until its own lease ran out; w3 has it now."""
    orders.send("orders", "Ship", command_id="k")
    orders.claim_raw("dead1")
    expire_leases(db)
    late = orders.claim_raw("w2")
    expire_leases(db)
    orders.claim_one("w3")
    orders.bus.run(put_right(domain="orders", worker="w2", odd=late.odd, max_bytes=1000))
    rows = db.execute("SELECT number, verdict, worker FROM commandbus.attempt ORDER BY number").fetchall()
    assert rows == [(1, "LOST", "dead1"), (2, "LOST", "w2")]
    assert one(db, "SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands") == "w3"


def test_the_same_worker_claims_its_own_lost_row_again(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship")
    zombie = orders.claim_one("w1")
    expire_leases(db)
    again = orders.claim_one("w1")
    assert orders.settle(zombie.complete(None), "w1") == {(zombie.msg_id, zombie.read_ct): "refused"}
    assert orders.settle(again.complete(None), "w1") == {}
    assert queue_length(db) == 0


def test_a_worker_that_lives_waives_its_own_attempts_however_often_their_leases_run_out(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    orders.send("orders", "Ship", command_id="k", max_attempts=1)
    for _ in range(3):
        orders.claim_one("w1")
        expire_leases(db)
    again = orders.claim_one("w1")
    assert (again.number, again.charge) == (4, 1)
    assert marks(db) == (3, None, None, None), "it is no suspect"
    rows = db.execute("SELECT number, verdict, error FROM commandbus.attempt ORDER BY number").fetchall()
    said = "its worker was alive, but could not renew the lease in time: not charged"
    assert rows == [(number, "LOST", said) for number in (1, 2, 3)]


def test_an_own_loss_beside_one_of_a_vanished_worker(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """Both were found by one claim: the first vanished, the second is this worker."""
    orders.send("orders", "Ship", command_id="k", max_attempts=1)
    orders.claim_raw("dead")
    expire_leases(db)
    orders.claim_raw("w1")
    expire_leases(db)
    assert orders.claim_one("w1").charge == 1
    assert marks(db) == (2, 1, True, None)


def marks(db: psycopg.Connection[Any], command_id: str = "k") -> tuple[Any, ...]:
    """What the command's row says of trouble: waived, suspect, alone, quarantine."""
    row = db.execute(
        "SELECT waived, suspect, alone, quarantine FROM commandbus.command WHERE command_id = %s", (command_id,)
    ).fetchone()
    assert row is not None
    return tuple(row)


def lose(orders: Bus, db: psycopg.Connection[Any], worker: str = "dead", **more: Any) -> None:
    """A worker claims what there is, starts it, and vanishes."""
    orders.claim(worker, **more)
    expire_leases(db)


def test_a_loss_without_a_verdict_is_waived_and_makes_a_suspect(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k", max_attempts=1)
    lose(orders, db)
    again = orders.claim_one("w2")
    assert (again.charge, again.is_suspect) == (1, True), "the row that the claim answers knows it, too"
    assert marks(db) == (1, 1, True, None)
    assert "not charged" in one(db, "SELECT error FROM commandbus.attempt")
    assert one(db, "SELECT headers ->> 'alone' FROM pgmq.q_orders__commands") == "true"


def test_a_suspect_that_is_lost_again_is_charged(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k")
    lose(orders, db, "dead1")
    lose(orders, db, "dead2")
    third = orders.claim_one("w3")
    assert (third.number, third.charge, third.is_suspect) == (3, 2, True)
    assert marks(db) == (1, 1, True, None)
    assert "while it ran alone: charged" in one(db, "SELECT error FROM commandbus.attempt WHERE number = 2")
    expire_leases(db)
    assert orders.claim_one("w4").charge == 3, "and from now on every loss is charged: it cannot go on for ever"


def test_a_crash_convicts_a_suspect_and_it_pays_for_what_was_waived(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    orders.send("orders", "Ship", command_id="k")
    lose(orders, db)
    suspect = orders.claim_one("w2")
    crash = Failure("WorkerLost", "WORKER_LOST", "its process died", rung="crash")
    assert suspect.claimed.charge_after(crash) == 2
    assert orders.settle(suspect.fail(Judgement(Verdict.RETRY, crash)), "w2") == {}
    assert marks(db) == (0, None, None, True)
    assert orders.claim_one("w2").charge == 3


def test_a_suspect_that_fails_by_itself_is_a_suspect_no_longer(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k")
    lose(orders, db)
    suspect = orders.claim_one("w2")
    assert orders.settle(fail(suspect, ValueError("no")), "w2") == {}
    assert marks(db) == (1, None, None, None)
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now()")
    again = orders.claim_one("w3")
    assert (again.charge, again.is_suspect) == (2, False)
    expire_leases(db)
    assert orders.claim_one("w4").charge == 2, "its next loss is its first"


def test_suspects_for_whom_there_is_no_room_are_given_back_for_later(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    for name in ("a", "b", "c"):
        orders.send("orders", "Ship", command_id=name)
    lose(orders, db)
    found = orders.claim_raw("w2")
    right, _ = orders.put_right(found, "w2", room=Room(alone=1))
    assert [row.command_id for row in right] == ["a"]
    rows = db.execute(
        "SELECT c.command_id, a.verdict, a.retry_at > a.finished_at FROM commandbus.attempt a "
        "JOIN commandbus.command c ON c.id = a.command WHERE a.number = 2 ORDER BY 1"
    ).fetchall()
    assert rows == [("b", "GIVEN_BACK", True), ("c", "GIVEN_BACK", True)]
    assert [marks(db, name) for name in ("a", "b", "c")] == [
        (1, 1, True, None),
        (2, 1, True, None),
        (2, 1, True, None),
    ]
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE vt > now() AND headers IS NULL") == 2


def test_a_suspect_that_only_waited_for_its_turn_is_not_charged(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """Everything dies again: the one that ran pays, and not those that were claimed with it."""
    for name in ("a", "b"):
        orders.send("orders", "Ship", command_id=name)
    lose(orders, db)
    found = orders.claim_raw("w2")
    (first,), _ = orders.put_right(found, "w2", room=Room(alone=1))
    assert orders.run_alone(first, "w2")
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() WHERE headers IS NULL")
    orders.claim_raw("w2")  # and dies before it was put right
    expire_leases(db)
    orders.claim("w3")
    assert marks(db, "a") == (1, 1, True, None), "two of its three attempts are charged"
    assert marks(db, "b") == (3, 1, True, None), "none but the one that it has now"


def test_suspects_that_wait_in_line_behind_the_one_that_ran_are_not_charged(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    for name in ("a", "b", "c"):
        orders.send("orders", "Ship", command_id=name)
    lose(orders, db)
    found = orders.claim_raw("w2")
    (first, _, _), _ = orders.put_right(found, "w2", room=Room(alone=3))
    assert orders.run_alone(first, "w2")
    expire_leases(db)
    orders.claim("w3")
    assert marks(db, "a") == (1, 1, True, None), "it ran: charged"
    assert [marks(db, name) for name in ("b", "c")] == [(2, 1, True, None)] * 2


def test_a_suspect_that_is_not_surely_held_does_not_start(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k")
    lose(orders, db)
    ((row,), _) = orders.put_right(orders.claim_raw("w2"), "w2")
    with psycopg.connect(orders.url) as other:
        other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        assert not orders.run_alone(row, "w2"), "somebody has locked its row"
    expire_leases(db)
    orders.claim_raw("w3")
    assert not orders.run_alone(row, "w2"), "it is somebody else's"
    assert one(db, "SELECT headers -> 'alone' FROM pgmq.q_orders__commands") is None


def test_quarantine_is_bounded_and_the_rest_is_given_back(orders: Bus, db: psycopg.Connection[Any]) -> None:
    for n in range(4):
        orders.send("orders", "Ship" if n else "Isolated", command_id=f"k{n}")
    stuck = Failure("ExecutionStuck", "EXECUTION_STUCK", "it hung", rung="stuck")
    orders.settle([attempt.fail(Judgement(Verdict.RETRY, stuck)) for attempt in orders.claim()])
    assert [marks(db, f"k{n}") for n in range(4)] == [(0, None, None, True)] * 4
    room = Room(quarantined=1, isolated=frozenset({"Isolated"}))
    before = one(db, "SELECT clock_timestamp()")
    right, _ = orders.put_right(orders.claim_raw("w2"), "w2", room=room)
    assert [row.command_id for row in right] == ["k0", "k1"]
    assert [marks(db, f"k{n}") for n in range(4)] == [(0, None, None, True)] * 2 + [(1, None, None, True)] * 2
    due = "SELECT vt FROM pgmq.q_orders__commands JOIN commandbus.command USING (msg_id) WHERE command_id = %s"
    for given_back in ("k2", "k3"):
        assert one(db, due, given_back) >= before + timedelta(seconds=FIRST_DELAY), "not before that is over"


def test_what_is_given_back_for_later_and_was_to_be_canceled_is_canceled(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    orders.send("orders", "Ship", command_id="k")
    lose(orders, db)
    orders.settle(orders.claim_one("w2").give_back(), "w2")
    found = orders.claim_raw("w3")
    orders.cancel("orders", "k", operator="ann")
    assert orders.put_right(found, "w3", room=Room(alone=0)) == ([], 0)
    assert orders.get_command("orders", "k").status is CommandStatus.CANCELED


def test_an_operator_retries_what_got_stuck_in_quarantine(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="k")
    stuck = Failure("ExecutionStuck", "EXECUTION_STUCK", "it hung", rung="stuck")
    orders.settle(orders.claim_one().fail(Judgement(Verdict.EXHAUSTED, stuck)))
    orders.tsq.operator_retry("orders", "k", operator="ann")
    assert marks(db) == (0, None, None, True)


def test_a_claim_does_not_wait_for_a_locked_row(orders: Bus) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=f"k{n}") for n in range(3)])
    with psycopg.connect(orders.url) as other:
        other.execute("SELECT FROM pgmq.q_orders__commands ORDER BY msg_id LIMIT 1 FOR UPDATE")
        assert [attempt.command_id for attempt in orders.claim()] == ["k1", "k2"]
    assert [attempt.command_id for attempt in orders.claim()] == ["k0"]


def test_a_claim_returns_commands_as_they_were_sent_wherever_their_rows_are(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=f"k{n}") for n in range(6)])
    for msg_id in (5, 1, 3):
        db.execute("UPDATE pgmq.q_orders__commands SET vt = vt WHERE msg_id = %s", (msg_id,))
    assert [row[COMMAND_ID] for row in orders.claim_raw().ready] == [f"k{n}" for n in range(6)]
