"""Priorities: bands of vt that a command keeps through everything that writes its vt (ADR 27)."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, expire_leases, fail, one, send_raw, started

from commandbus import InvalidCommandError, NewCommand, PermanentCommandError
from commandbus.errors import DuplicateCommandError
from commandbus.flow.commands.claim import Claim, claim, next_due
from commandbus.flow.commands.rescue import claimable_work, held_by
from commandbus.model.priority import HIGH, LOW, NORMAL
from commandbus.worker.execution.attempt import Attempt

Db = psycopg.Connection[Any]
ALL = ("high", "normal", "low")
BANDS = {"high": HIGH, "normal": NORMAL, "low": LOW}


@pytest.fixture
def three(orders: Bus) -> Bus:
    """A bus whose domain has a command of each priority, which is its command_id, too."""
    for name in reversed(ALL):
        orders.send("orders", "Ship", command_id=name, priority=name)
    return orders


def claim_band(bus: Bus, name: str, worker: str = "w1", *, cursor: datetime | None = None) -> Claim:
    found: Claim = bus.bus.run(
        claim(domain="orders", worker=worker, n=10, lease_seconds=30, cursor=cursor, band=BANDS[name])
    )
    return found


def claim_each(bus: Bus, worker: str = "w1") -> dict[str, Attempt]:
    """Claim every band, and put right what is odd. Returns the attempts by their ids."""
    found = {}
    for name in ALL:
        got = claim_band(bus, name, worker)
        rows = [*got.ready, *(bus.put_right(got, worker)[0] if got.odd else [])]
        assert [row[3] for row in rows] in ([name], []), name
        found |= {row[3]: started(Attempt("orders", tuple(row), None, 0.0)) for row in rows}
    return found


def in_bands(db: Db) -> dict[str, str]:
    """In which band the queue row of each command is."""
    rows = db.execute(
        "SELECT command_id, "
        "CASE WHEN vt < 'epoch' THEN 'high' WHEN vt > '2900-01-01' THEN 'low' ELSE 'normal' END "
        "FROM pgmq.q_orders__commands q JOIN commandbus.command c USING (msg_id)"
    )
    return dict(rows.fetchall())


KEPT = {name: name for name in ALL}


def due_in(db: Db, name: str) -> float:
    """In how many seconds a message is due."""
    seconds = one(
        db,
        "SELECT extract(epoch FROM commandbus.due_at(vt) - now())::float8 FROM pgmq.q_orders__commands q "
        "JOIN commandbus.command c USING (msg_id) WHERE command_id = %s",
        name,
    )
    return float(seconds)


def test_each_band_is_claimed_by_itself(three: Bus, db: Db) -> None:
    assert in_bands(db) == KEPT
    normal = claim_band(three, "normal")
    assert ([row[3] for row in normal.ready], normal.others) == (["normal"], 3)
    assert [row[3] for row in claim_band(three, "low").ready] == ["low"]
    assert [row[3] for row in claim_band(three, "high").ready] == ["high"]
    assert in_bands(db) == KEPT
    assert all(29 < due_in(db, name) <= 30 for name in ALL)
    for name in ALL:
        assert claim_band(three, name).ready == []
        assert three.get_command("orders", name).priority == name


def test_a_plain_command_says_nothing_of_priorities(orders: Bus, db: Db) -> None:
    sent = orders.send("orders", "Ship", priority="normal")
    assert one(db, "SELECT message FROM pgmq.q_orders__commands") == {"command": sent.id}
    assert one(db, "SELECT priority FROM commandbus.command") is None
    assert orders.claim_raw().others == 0


def test_cursors_are_moments_in_every_band(three: Bus) -> None:
    now = datetime.now(UTC)
    for name in ALL:
        assert claim_band(three, name, cursor=now + timedelta(minutes=1)).ready == []
        found = claim_band(three, name, cursor=now - timedelta(minutes=1))
        assert len(found.ready) == 1
        assert found.last_vt is not None
        assert abs(found.last_vt - now) < timedelta(minutes=1)


def test_leases_retries_and_given_back_ones_stay_in_their_bands(three: Bus, db: Db) -> None:
    attempts = claim_each(three)
    held = three.bus.run(held_by("orders", "w1", running=(), past_seconds=0.0, lease_seconds=30))
    assert {row.command_id for row, _ in held} == set(ALL)
    three.settle([fail(item, RuntimeError("again")) for item in attempts.values()])
    assert in_bands(db) == KEPT
    again = claim_each(three)
    assert {name: item.read_ct for name, item in again.items()} == dict.fromkeys(ALL, 2)
    three.settle([item.give_back("no room") for item in again.values()])
    assert in_bands(db) == KEPT
    assert set(claim_each(three)) == set(ALL)


def test_a_lost_worker_s_commands_stay_in_their_bands(three: Bus, db: Db) -> None:
    claim_each(three)
    expire_leases(db)
    assert in_bands(db) == KEPT
    lost = claim_each(three, "w2")
    assert {name: item.read_ct for name, item in lost.items()} == dict.fromkeys(ALL, 2)


def test_a_renewed_lease_ends_later_in_every_band(three: Bus, db: Db) -> None:
    attempts = claim_each(three)
    three.renew(list(attempts.values()), lease=300)
    assert in_bands(db) == KEPT
    assert all(290 < due_in(db, name) <= 300 for name in ALL)


def test_delayed_commands_are_due_at_their_time(orders: Bus, db: Db) -> None:
    for name in ALL:
        orders.send("orders", "Ship", command_id=name, priority=name, delay=40)
    assert in_bands(db) == KEPT
    assert claim_each(orders) == {}
    assert 39 < orders.bus.run(next_due("orders")) <= 40
    assert orders.status("orders")[0].delayed == 3
    db.execute("UPDATE pgmq.q_orders__commands SET vt = vt - interval '1 minute'")
    assert set(claim_each(orders)) == set(ALL)


@pytest.mark.parametrize("name", ["high", "low"])
def test_a_sleeping_worker_learns_of_a_due_command(orders: Bus, name: str) -> None:
    assert orders.bus.run(next_due("orders")) is None
    orders.send("orders", "Ship", priority=name)
    assert 0 < orders.bus.run(next_due("orders")) <= 0.05


def test_status_counts_and_ages_know_the_bands(three: Bus, db: Db) -> None:
    db.execute(
        "UPDATE pgmq.q_orders__commands SET vt = vt - interval '50 s', enqueued_at = enqueued_at - interval '50 s'"
    )
    status = three.status("orders")[0]
    assert (status.ready, status.delayed, status.running) == (3, 0, 0)
    assert 50 <= status.oldest_seconds < 100
    work = three.bus.run(claimable_work("orders"))
    assert work.ready == 3
    assert 50 <= work.oldest_seconds < 100
    claim_each(three)
    status = three.status("orders")[0]
    assert (status.ready, status.delayed, status.running) == (0, 0, 3)


def test_a_pause_parks_and_a_resume_wakes_in_the_bands(three: Bus, db: Db) -> None:
    three.pause("orders", "Ship", operator="ann")
    assert claim_each(three) == {}
    assert in_bands(db) == KEPT
    assert all(due_in(db, name) > 300_000_000 for name in ALL)
    assert three.status("orders")[0].parked == 3
    three.resume("orders", "Ship", operator="ann")
    assert in_bands(db) == KEPT
    assert set(claim_each(three)) == set(ALL)


def test_an_operator_s_retry_keeps_the_priority(three: Bus, db: Db) -> None:
    three.settle([fail(item, PermanentCommandError("no")) for item in claim_each(three).values()])
    assert in_bands(db) == {}
    three.tsq.retry_all("orders", operator="ann")
    assert in_bands(db) == KEPT


def test_send_many_and_batches_keep_priorities(orders: Bus, db: Db) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=name, priority=name) for name in ALL])  # type: ignore[arg-type]
    assert in_bands(db) == KEPT
    db.execute("DELETE FROM pgmq.q_orders__commands")
    orders.create_batch("orders", [{"command_type": "Ship", "command_id": f"b{n}", "priority": n} for n in ALL])
    assert in_bands(db) == {f"b{name}": name for name in ALL}


def test_a_replacement_has_its_own_priority(orders: Bus, db: Db) -> None:
    for name in ("normal", "high", "low", "normal", "low", "high"):
        sent = orders.send("orders", "Ship", unique="k", on_conflict="replace", priority=name)
        assert in_bands(db) == {sent.command_id: name}
        assert due_in(db, sent.command_id) <= 0


def test_raw_envelopes_have_priorities(orders: Bus, db: Db) -> None:
    for name in ALL:
        send_raw(db, json.dumps({"command_type": "Ship", "command_id": name, "priority": name}))
    send_raw(db, json.dumps({"command_type": "Ship", "priority": "urgent"}))
    orders.claim()
    assert in_bands(db) == KEPT
    assert 'priority must be "high", "normal" or "low", not \'urgent\'' in one(
        db, "SELECT reason FROM commandbus.rejected_message"
    )
    assert set(claim_each(orders)) == set(ALL)


def test_a_foreign_p_moves_nothing(orders: Bus, db: Db) -> None:
    for text in ('{"p": 7}', '{"p": "1"}', '["p"]', '"p"', '{"p": {"p": 1}}'):
        send_raw(db, text)
    assert (
        one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE vt BETWEEN '2000-01-01' AND '2900-01-01'") == 5
    )


@pytest.mark.parametrize("value", ["urgent", "HIGH", 1, True, ["high"], ""])
def test_a_bad_priority_is_named(orders: Bus, value: Any) -> None:
    with pytest.raises(InvalidCommandError, match="priority must be") as caught:
        orders.send("orders", "Ship", priority=value)
    assert repr(value) in str(caught.value)
    with pytest.raises(InvalidCommandError, match="command 1 of send_many: priority must be"):
        orders.send_many("orders", [NewCommand("Ship", priority=value)])


def test_a_second_send_with_another_priority_differs(three: Bus) -> None:
    assert not three.send("orders", "Ship", command_id="high", priority="high").created
    with pytest.raises(DuplicateCommandError, match="priority"):
        three.send("orders", "Ship", command_id="high")


def test_canceling_finds_every_band(three: Bus, db: Db) -> None:
    for name in ALL:
        three.cancel("orders", name, operator="ann")
    assert in_bands(db) == {}


def test_sessions_in_other_time_zones_agree(three: Bus, db: Db) -> None:
    for zone in ("Europe/Berlin", "America/New_York", "Pacific/Apia"):
        db.execute(f"SET timezone TO '{zone}'".encode())
        db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '40 s'")
        db.execute("SET timezone TO 'UTC'")
        assert all(35 < due_in(db, name) <= 40 for name in ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_s_commands_have_its_priority(
    orders: Bus, part: Callable[[str], Any], db: Db, name: str
) -> None:
    schedules = part("schedules")
    made = schedules.create("orders", "nightly", every="1h", priority=name)
    assert made.priority == (None if name == "normal" else name)
    schedules.run_now("orders", "nightly")
    assert list(in_bands(db).values()) == [name]
    with pytest.raises(InvalidCommandError, match=r"priority must be .* not 'urgent'"):
        schedules.create("orders", "other", every="1h", priority="urgent")
