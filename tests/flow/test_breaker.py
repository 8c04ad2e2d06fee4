"""Breakers of command types: they open once, half open with one probe, close, and lose no command."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from breaker_harness import (
    THREE,
    Db,
    actions,
    failed,
    half_open,
    let_time_pass,
    open_it,
    state,
    step,
    stuck,
    tell,
)
from flow_harness import Bus, at_once, expire_leases, fail, one, queue_length, sync_only, wait_until_blocked

from commandbus import CommandBus, CommandStatus, NewCommand, PermanentCommandError
from commandbus.flow.breakers.breaker import Moved, advance, explain, report, watch
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.flow.commands.settle import given_back, settle
from commandbus.model.breaker import Breaker

# --- counting


def test_it_opens_after_so_many_stuck_attempts_and_says_why(orders: Bus, db: Db) -> None:
    assert tell(orders, stuck()) is None
    assert tell(orders, stuck()) is None
    assert state(db) == "CLOSED"
    moved = tell(orders, stuck(text="ExecutionStuck: did not respond\nmore"))
    assert moved is not None
    assert moved.state == "OPEN"
    assert re.fullmatch(
        r"3 of 3 attempts stuck since \d\d:\d\d:\d\d UTC \(3 commands\), the last: ExecutionStuck: did not.*",
        moved.reason,
    )
    assert tell(orders, stuck(), stuck()) is None, "it is open already"
    assert actions(db) == [("breaker orders/Ship", "OPEN", "commandbus")]
    (info,) = orders.breakers()
    assert (info.kind, info.name, info.state, info.stuck, info.failures, info.is_forced) == (
        "type", "orders/Ship", "OPEN", 5, 0, False,
    )  # fmt: skip
    assert info.reason == moved.reason
    assert info.until - info.opened_at == timedelta(seconds=60)


def test_what_has_left_the_window_does_not_count(orders: Bus, db: Db) -> None:
    tell(orders, stuck(), stuck())
    db.execute(
        "UPDATE commandbus.breaker SET recent = (SELECT jsonb_agg(jsonb_build_array("
        "x -> 0, x -> 1, (x ->> 2)::float8 - 7200, (x ->> 3)::float8 - 7200)) FROM jsonb_array_elements(recent) x)"
    )
    assert [info.stuck for info in orders.breakers()] == [0]
    assert tell(orders, stuck(), stuck()) is None
    assert [info.stuck for info in orders.breakers()] == [2]
    assert tell(orders, stuck()) is not None


def test_failures_count_where_that_is_wanted_and_a_stuck_one_is_a_failure_too(orders: Bus) -> None:
    rule = Breaker(stuck=0, failures=3, window="10m")
    assert tell(orders, failed(), stuck(), rule=rule) is None
    moved = tell(orders, failed(), rule=rule)
    assert moved is not None
    assert re.fullmatch(r"3 of 3 attempts failed since .* \(3 commands\), the last: ValueError: no", moved.reason)


def test_types_and_domains_are_counted_apart(orders: Bus, db: Db) -> None:
    orders.create_domain("billing")
    for kind in ("Ship", "Pack"):
        assert tell(orders, stuck(), stuck(), kind=kind) is None
    assert orders.run(report("billing", "Ship", THREE, bad=[stuck()])) is None
    assert actions(db) == []


@sync_only
def test_concurrent_reporters_open_it_once(orders: Bus, db: Db) -> None:
    """Eight sessions at once: every attempt is counted, and one of them opens it."""

    def reporter() -> list[Moved]:
        with CommandBus(orders.url) as bus:
            answers = [bus.run(report("orders", "Ship", Breaker(stuck=40), bad=[stuck()])) for _ in range(10)]
        return [answer for answer in answers if answer is not None]

    answers = at_once([reporter] * 8)
    assert [len(answer) for answer in answers if isinstance(answer, list)].count(1) == 1, answers
    assert sum(len(answer) for answer in answers if isinstance(answer, list)) == 1
    assert actions(db) == [("breaker orders/Ship", "OPEN", "commandbus")]
    assert one(db, "SELECT reason LIKE '40 of 40 attempts stuck since %%' FROM commandbus.breaker")


# --- parking


def test_its_commands_are_parked_with_the_reason_and_others_go_on(orders: Bus, db: Db) -> None:
    for n in range(2):
        orders.send("orders", "Ship", command_id=f"s{n}", max_attempts=1)
        orders.send("orders", "Pack", command_id=f"p{n}")
    open_it(orders)
    assert sorted(attempt.command_id for attempt in orders.claim()) == ["p0", "p1"]
    record = orders.get_command("orders", "s0")
    assert (record.status, record.waiting_for, record.visible_at) == (CommandStatus.PENDING, "breaker", None)
    assert re.fullmatch(
        r"breaker open: 3 of 3 attempts stuck since .* \(3 commands\), the last: ExecutionStuck: it hangs",
        record.waiting_note,
    )
    assert 50 < (record.waiting_until - datetime.now(UTC)).total_seconds() <= 60
    said = orders.get_audit_trail("orders", "s0")[-1]
    assert (said.event, said.attempt, said.details["error_code"]) == ("PARKED", 1, "BREAKER_OPEN")
    until = record.waiting_until.astimezone(UTC)
    assert said.details["error"].startswith(f"breaker open until {until:%H:%M:%S} UTC: 3 of 3 attempts stuck")
    assert one(db, "SELECT note FROM commandbus.parked LIMIT 1") == said.details["error"]
    assert orders.claim() == []
    assert [info.parked for info in orders.breakers()] == [2]
    assert orders.status("orders")[0].parked == 2
    assert orders.close_breaker("orders", "Ship", operator="ann") == 2
    again = orders.claim()
    assert sorted(attempt.command_id for attempt in again) == ["s0", "s1"]
    assert all((attempt.number, attempt.charge) == (2, 1) for attempt in again), "parking is not charged"
    assert orders.settle([attempt.complete(None) for attempt in again]) == {}
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0


def test_a_retry_and_a_lost_attempt_are_parked_too(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="retried")
    attempt = orders.claim_one()
    orders.send("orders", "Ship", command_id="lost")
    orders.claim_one("dead")
    open_it(orders)
    orders.settle(fail(attempt, ValueError("x")))
    expire_leases(db)
    assert orders.claim("w2") == []
    rows = db.execute("SELECT number, verdict FROM commandbus.attempt ORDER BY command, number").fetchall()
    assert rows == [(1, "RETRY"), (2, "PARKED"), (1, "LOST"), (2, "PARKED")]
    orders.close_breaker("orders", "Ship")
    assert sorted((again.command_id, again.number, again.charge) for again in orders.claim("w2")) == [
        ("lost", 3, 1),
        ("retried", 3, 2),
    ]


def test_a_parked_command_can_be_cancelled(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="k")
    open_it(orders)
    assert orders.claim() == []
    assert orders.cancel("orders", "k") == "CANCELED"
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert queue_length(db) == 0
    let_time_pass(db)
    assert step(orders) is None, "nothing is there to be tried"
    assert state(db) == "OPEN"


def test_pause_and_breaker_together(orders: Bus, db: Db) -> None:
    """Either alone keeps a command back, in either order of their ends; a paused probe is the probe still."""
    for command_id in ("a", "b"):
        orders.send("orders", "Ship", command_id=command_id)
    open_it(orders)
    orders.pause("orders", "Ship")
    assert orders.claim() == []
    assert {orders.get_command("orders", name).waiting_for for name in "ab"} == {"pause"}
    assert orders.resume("orders", "Ship") == 2
    assert orders.claim() == []
    assert {orders.get_command("orders", name).waiting_for for name in "ab"} == {"breaker"}
    orders.pause("orders", "Ship")
    probe = half_open(orders, db)
    assert orders.claim() == []
    (paused,) = db.execute("SELECT command, reason FROM commandbus.parked WHERE reason = 'pause'").fetchall()
    assert paused == (probe, "pause")
    assert step(orders) is None, "it waits for its probe"
    assert orders.resume("orders", "Ship") == 1
    attempt = orders.claim_one()
    assert (attempt.id, attempt.row[22]) == (probe, True)
    orders.settle(attempt.complete(None))
    orders.pause("orders", "Ship")
    assert tell(orders, good=[probe]) == Moved("orders", "Ship", "CLOSED", "its probe went well", 1)
    assert orders.claim() == []
    assert orders.resume("orders", "Ship") == 1
    assert orders.claim_one().row[22] is False


def test_a_row_that_a_limit_left_is_taken_over(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="k")
    msg_id, command = db.execute("SELECT msg_id, id FROM commandbus.command").fetchone() or (0, 0)
    db.execute(
        "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since, "
        "woken_at, token) VALUES ('orders', 'Ship', %s, %s, 'limit', 'docai', now(), now(), 't')",
        (msg_id, command),
    )
    open_it(orders)
    assert orders.claim() == []
    assert db.execute("SELECT reason, limit_name, woken_at, token FROM commandbus.parked").fetchall() == [
        ("breaker", None, None, None)
    ]


@sync_only
def test_closing_waits_for_who_is_parking_and_finds_what_it_parked(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="k")
    open_it(orders)
    found = orders.claim_raw()
    with psycopg.connect(orders.url) as other:
        other.execute("SELECT FROM commandbus.breaker FOR SHARE")  # as a parking does
        jobs: list[Callable[[], Any]] = [
            lambda: orders.close_breaker("orders", "Ship"),
            lambda: _commit(other, db),
        ]
        assert at_once(jobs)[0] == 0
    assert orders.put_right(found) == ([], 0)
    assert orders.get_command("orders", "k").waiting_for is None, (
        "the breaker was closed before: back to the queue"
    )
    assert [(row.number, row.verdict) for row in orders.get_attempts("orders", "k")] == [(1, "GIVEN_BACK")]
    assert (orders.claim_one().number, one(db, "SELECT count(*) FROM commandbus.parked")) == (2, 0)


def _commit(other: Db, db: Db) -> None:
    wait_until_blocked(db)
    other.commit()


@sync_only
def test_opening_and_closing_race_with_parking(orders: Bus, db: Db) -> None:
    """Claimers park while the breaker opens and closes, many times: in the end nothing stays parked."""
    count = 40
    orders.send_many("orders", [NewCommand("Ship") for _ in range(count)])
    over = threading.Event()

    def operator() -> None:
        try:
            with CommandBus(orders.url) as bus:
                for turn in range(60):
                    bus.run(report("orders", "Ship", THREE, bad=[stuck(), stuck(), stuck()]))
                    if turn % 2:
                        let_time_pass(db)
                        bus.run(advance("orders", "Ship"))
                    bus.close_breaker("orders", "Ship", operator="ann")
        finally:
            over.set()

    def worker(name: str) -> int:
        seen = 0
        with CommandBus(orders.url) as bus:
            while not over.is_set():
                found = bus.run(claim(domain="orders", worker=name, n=10, lease_seconds=60, cursor=None))
                rows = list(found.ready)
                if found.odd:
                    right, _ = bus.run(put_right(domain="orders", worker=name, odd=found.odd, max_bytes=1000))
                    rows += right
                    seen += len(found.odd) - len(right)
                back = [given_back(ClaimedRow(*row).fence("orders")) for row in rows]
                while back:  # busy: the other claimer looked at the row just now
                    answers = bus.run(settle("orders", name, back))
                    assert set(answers.values()) <= {"busy"}
                    back = [item for item in back if (item.msg_id, item.read_ct) in answers]
        return seen

    answers = at_once([operator, lambda: worker("w1"), lambda: worker("w2")])
    assert answers[0] is None, answers
    assert all(isinstance(answer, int) for answer in answers[1:]), answers
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0
    assert queue_length(db) == count
    last = orders.claim("late", count)
    assert len(last) == count
    assert {attempt.charge for attempt in last} == {1}


# --- the probe


def test_one_probe_goes_through_and_when_it_went_well_all_do(orders: Bus, db: Db) -> None:
    sent = [orders.send("orders", "Ship", command_id=f"s{n}").id for n in range(4)]
    open_it(orders)
    assert orders.claim() == []
    assert step(orders) is None, "it is not time yet"
    (before,) = orders.run(watch(["orders"])).due
    assert 50 < before.seconds <= 60
    with psycopg.connect(orders.url, autocommit=True) as listener:
        listener.execute("LISTEN commandbus_orders")
        assert half_open(orders, db) == sent[0], "the one that has waited longest"
        assert len(list(listener.notifies(timeout=10, stop_after=1))) == 1
    orders.send("orders", "Ship", command_id="later")
    attempt = orders.claim_one()
    assert (attempt.id, attempt.row[22]) == (sent[0], True)
    assert orders.claim() == []
    assert step(orders) is None
    (info,) = orders.breakers()
    assert (info.state, info.probe, info.parked) == ("HALF_OPEN", "s0", 4)
    assert orders.get_command("orders", "s1").waiting_note.startswith(
        "breaker half open, one command is the probe: 3 of 3 attempts stuck"
    )
    assert tell(orders, stuck(sent[3]), stuck(sent[3])) is None, "what had begun before says nothing"
    assert tell(orders, good=[sent[3]]) is None
    assert tell(orders, good=[sent[0]]) == Moved("orders", "Ship", "CLOSED", "its probe went well", 4)
    assert orders.settle(attempt.complete(None)) == {}
    assert sorted(each.command_id for each in orders.claim()) == ["later", "s1", "s2", "s3"]
    assert [action for _, action, _ in actions(db)] == ["OPEN", "HALF_OPEN", "CLOSE"]
    (info,) = orders.breakers()
    assert (info.state, info.stuck, info.reason, info.until) == ("CLOSED", 0, None, None)


def test_a_probe_that_went_badly_opens_it_again(orders: Bus, db: Db) -> None:
    sent = [orders.send("orders", "Ship", command_id=f"s{n}").id for n in range(2)]
    open_it(orders)
    orders.claim()
    assert half_open(orders, db) == sent[0]
    attempt = orders.claim_one()
    moved = tell(orders, stuck(sent[0], "ExecutionStuck: again"))
    assert moved == Moved("orders", "Ship", "OPEN", "its probe got stuck: ExecutionStuck: again")
    assert orders.settle(fail(attempt, ValueError("x"))) == {}
    assert orders.claim() == []
    assert [info.parked for info in orders.breakers()] == [2]
    assert orders.get_command("orders", "s1").waiting_note.startswith("breaker open: its probe got stuck")
    assert half_open(orders, db) == sent[1], "the next one's turn"
    assert [action for _, action, _ in actions(db)] == ["OPEN", "HALF_OPEN", "OPEN", "HALF_OPEN"]


def test_probes_rotate_also_across_retries(orders: Bus, db: Db) -> None:
    """The one that was the probe in vain comes after all that were not, whenever they were parked."""
    sent = [orders.send("orders", "Ship", command_id=f"s{n}").id for n in range(3)]
    open_it(orders)
    orders.claim()
    tried = []
    for turn in range(7):
        probe = half_open(orders, db)
        tried.append(probe)
        attempt = orders.claim_one()
        assert attempt.id == probe
        assert tell(orders, stuck(probe)) is not None
        assert orders.settle(fail(attempt, ValueError("x"))) == {}
        db.execute("UPDATE pgmq.q_orders__commands SET vt = now() WHERE vt < now() + interval '1 day'")
        if turn == 2:
            sent.append(orders.send("orders", "Ship", command_id="late").id)
        assert orders.claim() == [], "its retry is parked again"
    assert tried == [*sent[:3], sent[3], *sent[:3]], "the newcomer, then once more by turns"
    orders.close_breaker("orders", "Ship")
    assert one(db, "SELECT vain FROM commandbus.breaker") == []


def test_a_poison_command_does_not_keep_the_others_from_being_tried(orders: Bus, db: Db) -> None:
    """It is alone when it is tried first, and comes back from its retry before the others are parked."""
    poison = orders.send("orders", "Ship", command_id="poison").id
    open_it(orders)
    orders.claim()
    assert half_open(orders, db) == poison
    attempt = orders.claim_one()
    tell(orders, stuck(poison))
    orders.settle(fail(attempt, ValueError("x")))
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now()")
    assert orders.claim() == []
    good = orders.send("orders", "Ship", command_id="good").id
    assert orders.claim() == []
    assert half_open(orders, db) == good
    assert tell(orders, good=[good]) is not None


def test_a_probe_that_failed_in_silence_was_in_vain(orders: Bus, db: Db) -> None:
    sent = [orders.send("orders", "Ship").id for _ in range(2)]
    open_it(orders)
    orders.claim()
    assert half_open(orders, db) == sent[0]
    assert orders.settle(fail(orders.claim_one(), PermanentCommandError("x"))) == {}
    step(orders)
    db.execute("UPDATE commandbus.breaker SET probe_until = now() - interval '1 ms'")
    step(orders)
    assert one(db, "SELECT probe FROM commandbus.breaker") == sent[1]
    assert one(db, "SELECT vain FROM commandbus.breaker") == [sent[0]]


def test_if_nothing_is_parked_the_next_that_arrives_is_tried(orders: Bus, db: Db) -> None:
    open_it(orders)
    let_time_pass(db)
    assert step(orders) is None
    sent = orders.send("orders", "Ship").id
    assert orders.claim() == []
    assert half_open(orders, db) == sent
    assert orders.claim_one().id == sent


def test_a_probe_whose_worker_vanished_is_tried_again(orders: Bus, db: Db) -> None:
    """A killed worker: the lease runs out, and the same command is the probe of whoever claims it then."""
    sent = [orders.send("orders", "Ship", command_id=f"s{n}").id for n in range(2)]
    open_it(orders)
    orders.claim()
    assert half_open(orders, db) == sent[0]
    orders.claim_one("dead")
    assert [item.is_probing for item in orders.run(watch(["orders"])).due] == [True]
    expire_leases(db)
    assert step(orders) is None
    again = orders.claim_one("w2")
    assert (again.id, again.row[22], again.number) == (sent[0], True, 3)
    assert orders.claim("w2") == []


def test_a_probe_that_was_given_back_stays_the_probe(orders: Bus, db: Db) -> None:
    sent = orders.send("orders", "Ship").id
    open_it(orders)
    orders.claim()
    half_open(orders, db)
    assert orders.settle(orders.claim_one().give_back()) == {}
    again = orders.claim_one()
    assert (again.id, again.row[22], again.charge) == (sent, True, 1)


def test_a_probe_that_is_canceled_makes_room_for_another(orders: Bus, db: Db) -> None:
    sent = [orders.send("orders", "Ship", command_id=f"s{n}").id for n in range(2)]
    open_it(orders)
    orders.claim()
    assert half_open(orders, db) == sent[0]
    assert orders.cancel("orders", "s0") == "CANCELED"
    assert [item.is_probing for item in orders.run(watch(["orders"])).due] == [False]
    moved = step(orders)
    assert moved is not None
    assert moved.state == "HALF_OPEN"
    assert orders.claim_one().id == sent[1]
    assert orders.cancel("orders", "s1") == "REQUESTED"


def test_a_probe_that_completed_without_a_word_closes_it(orders: Bus, db: Db) -> None:
    """Its worker was killed after the commit and before it could report."""
    orders.send_many("orders", [NewCommand("Ship"), NewCommand("Ship")])
    open_it(orders)
    orders.claim()
    half_open(orders, db)
    assert orders.settle(orders.claim_one().complete(None)) == {}
    assert step(orders) == Moved("orders", "Ship", "CLOSED", "its probe went well", 1)


def test_a_probe_that_failed_without_a_word_is_replaced_after_a_while(orders: Bus, db: Db) -> None:
    sent = [orders.send("orders", "Ship").id for _ in range(2)]
    open_it(orders)
    orders.claim()
    half_open(orders, db)
    assert orders.settle(fail(orders.claim_one(), PermanentCommandError("x"))) == {}
    assert step(orders) is None, "the word may be on its way"
    assert step(orders) is None
    assert one(db, "SELECT probe_until > now() FROM commandbus.breaker")
    db.execute("UPDATE commandbus.breaker SET probe_until = now() - interval '1 ms'")
    moved = step(orders)
    assert moved is not None
    assert moved.state == "HALF_OPEN"
    assert orders.claim_one().id == sent[1]
    orders.cancel("orders", orders.query_commands(limit=1).items[0].command_id)
    db.execute("UPDATE commandbus.breaker SET probe = 0")  # forgotten by retention
    moved = step(orders)
    assert moved is not None
    assert (moved.state, moved.reason) == ("OPEN", "nothing was heard of its probe")
    assert orders.run(watch(["orders"])).due[0].seconds <= 0


@sync_only
def test_many_workers_choose_one_probe_and_one_closes_it(orders: Bus, db: Db) -> None:
    for turn in range(5):
        orders.send_many("orders", [NewCommand("Ship") for _ in range(5)])
        open_it(orders)
        assert orders.claim() == []
        let_time_pass(db)

        def choose() -> Moved | None:
            with CommandBus(orders.url) as bus:
                return bus.run(advance("orders", "Ship"))

        chosen = at_once([choose] * 8)
        assert [type(answer) for answer in chosen].count(Moved) == 1, chosen
        assert one(db, "SELECT count(*) FROM commandbus.parked") == 4
        claimed = at_once([lambda: _claim(orders.url)] * 4)
        (probe,) = [row for rows in claimed for row in rows]  # type: ignore[union-attr]

        def close(command: int = probe) -> Moved | None:
            with CommandBus(orders.url) as bus:
                return bus.run(report("orders", "Ship", THREE, good=[command]))

        closed = at_once([close] * 8)
        assert [type(answer) for answer in closed].count(Moved) == 1, closed
        assert [action for _, action, _ in actions(db)] == ["OPEN", "HALF_OPEN", "CLOSE"] * (turn + 1)
        db.execute("DELETE FROM pgmq.q_orders__commands")
        db.execute("DELETE FROM commandbus.command")


def _claim(url: str) -> list[int]:
    """What a session of its own gets to run."""
    with CommandBus(url) as bus:
        found = bus.run(claim(domain="orders", worker="w", n=10, lease_seconds=60, cursor=None))
        rows = list(found.ready)
        if found.odd:
            rows += bus.run(put_right(domain="orders", worker="w", odd=found.odd, max_bytes=1000))[0]
    return [row[2] for row in rows]


def test_retention_leaves_parked_commands_alone(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="k")
    open_it(orders)
    assert orders.claim() == []
    db.execute("UPDATE commandbus.command SET created_at = now() - interval '90 days'")
    assert orders.prune(age="1d").commands == 0
    assert orders.get_command("orders", "k").waiting_for == "breaker"
    assert orders.close_breaker("orders", "Ship") == 1


# --- words


def test_the_sentence_for_people() -> None:
    now = datetime(2026, 1, 1, 12, 3, tzinfo=UTC)
    later = now + timedelta(seconds=7)
    said = [
        explain("OPEN", is_forced=False, until=later, reason="why", now=now),
        explain("OPEN", is_forced=False, until=now, reason="why", now=later),
        explain("HALF_OPEN", is_forced=False, until=now, reason="why", now=later),
        explain("OPEN", is_forced=True, until=None, reason="by ann: flood", now=later),
    ]
    assert said == [
        "breaker open until 12:03:07 UTC: why",
        "breaker open, the next command is the probe: why",
        "breaker half open, one command is the probe: why",
        "breaker opened by ann: flood",
    ]
