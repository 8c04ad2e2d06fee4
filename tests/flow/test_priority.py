"""Priorities: bands of vt that a command keeps through everything that writes its vt (ADR 27)."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from breaker_harness import half_open, open_it
from flow_harness import Bus, expire_leases, fail, one, send_raw, started

from commandbus import (
    CommandBus,
    CommandNotFoundError,
    HandlerRegistry,
    InvalidCommandError,
    InvalidOperationError,
    NewCommand,
    PermanentCommandError,
)
from commandbus.flow.commands.claim import Claim, claim, next_due
from commandbus.flow.commands.declare_priorities import declare_priorities
from commandbus.flow.commands.expire import BEGINNING, due_to_expire, expire
from commandbus.flow.commands.rescue import claimable_work, held_by
from commandbus.model.priority import HIGH, LOW, NORMAL
from commandbus.worker.execution.attempt import Attempt

Db = psycopg.Connection[Any]
SetPriority = Callable[..., Any]
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
    found: dict[str, Attempt] = {}
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
        "CASE WHEN vt < '1500-01-01' THEN 'high' WHEN vt > '2500-01-01' THEN 'low' ELSE 'normal' END "
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
    sent = orders.send("orders", "Ship")
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
    assert 39 < orders.bus.run(next_due("orders")).seconds <= 40
    assert orders.status("orders")[0].delayed == 3
    db.execute("UPDATE pgmq.q_orders__commands SET vt = vt - interval '1 minute'")
    assert set(claim_each(orders)) == set(ALL)


@pytest.mark.parametrize("name", ["high", "low"])
def test_a_sleeping_worker_learns_of_a_due_command(orders: Bus, name: str) -> None:
    assert orders.bus.run(next_due("orders")).seconds is None
    orders.send("orders", "Ship", priority=name)
    assert 0 < orders.bus.run(next_due("orders")).seconds <= 0.05


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


@pytest.mark.parametrize("why", ["pause", "breaker"])
def test_what_is_parked_and_woken_stays_in_its_band(three: Bus, db: Db, why: str) -> None:
    stop, go = (three.pause, three.resume) if why == "pause" else (three.open_breaker, three.close_breaker)
    stop("orders", "Ship", operator="ann")
    assert claim_each(three) == {}
    assert in_bands(db) == KEPT
    assert all(due_in(db, name) > 300_000_000 for name in ALL)
    assert three.status("orders")[0].parked == 3
    go("orders", "Ship", operator="ann")
    assert in_bands(db) == KEPT
    assert set(claim_each(three)) == set(ALL)


def test_a_breaker_s_probe_stays_in_its_band(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship", command_id="low", priority="low")
    open_it(orders)
    assert claim_each(orders) == {}
    half_open(orders, db)
    assert in_bands(db) == {"low": "low"}
    assert set(claim_each(orders)) == {"low"}


def test_expired_ones_are_found_in_every_band(orders: Bus, db: Db) -> None:
    for name in ALL:
        orders.send("orders", "Ship", command_id=name, priority=name, expires=60)
    db.execute("UPDATE commandbus.command SET expires_at = now() - interval '1 s'")
    due = orders.run(due_to_expire(BEGINNING, 0))
    assert len(due) == 3
    orders.run(expire("orders", [item.id for item in due]))
    assert in_bands(db) == {}
    assert {orders.get_command("orders", name).status for name in ALL} == {"CANCELED"}


def test_metrics_of_the_queue_know_the_bands(three: Bus, part: Callable[[str], Any], db: Db) -> None:
    three.send("orders", "Ship", priority="high", delay=60)
    three.send("orders", "Ship", priority="low", delay=60)
    metrics = part("queues").metrics("orders__commands")
    assert (metrics.queue_length, metrics.queue_visible_length) == (5, 3)
    three.create_queue("other")
    part("queues").send("other", {})
    db.execute("UPDATE pgmq.q_other SET vt = '2999-12-31'")  # hidden, and of no priority
    assert part("queues").metrics("other").queue_visible_length == 0


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


@pytest.mark.parametrize("value", ["urgent", "HIGH", 1, True, ["high"], ""])
def test_a_bad_priority_is_named(orders: Bus, value: Any) -> None:
    with pytest.raises(InvalidCommandError, match="priority must be") as caught:
        orders.send("orders", "Ship", priority=value)
    assert repr(value) in str(caught.value)
    with pytest.raises(InvalidCommandError, match="command 1 of send_many: priority must be"):
        orders.send_many("orders", [NewCommand("Ship", priority=value)])


def test_a_second_send_does_not_change_the_priority(three: Bus, db: Db) -> None:
    for again in (*ALL, None):
        assert not three.send("orders", "Ship", command_id="high", priority=again).created
    assert in_bands(db) == KEPT


def test_canceling_finds_every_band(three: Bus, db: Db) -> None:
    for name in ALL:
        three.cancel("orders", name, operator="ann")
    assert in_bands(db) == {}


def test_sessions_in_other_time_zones_agree(three: Bus, db: Db, database: str) -> None:
    for zone in ("Europe/Berlin", "America/New_York", "Pacific/Apia"):
        with CommandBus(f"{database}?options=-c%20timezone%3D{zone}") as other:
            for name in ALL:
                claimed = claim(
                    domain="orders", worker="w1", n=10, lease_seconds=40, cursor=None, band=BANDS[name]
                )
                assert [row[3] for row in other.run(claimed).ready] == [name]
        assert in_bands(db) == KEPT
        assert all(35 < due_in(db, name) <= 40 for name in ALL)
        expire_leases(db)
        db.execute("UPDATE pgmq.q_orders__commands SET headers = NULL")


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_s_commands_have_its_priority(
    orders: Bus, part: Callable[[str], Any], db: Db, name: str
) -> None:
    schedules = part("schedules")
    made = schedules.create("orders", "nightly", every="1h", priority=name)
    assert made.priority == name
    schedules.run_now("orders", "nightly")
    assert list(in_bands(db).values()) == [name]
    with pytest.raises(InvalidCommandError, match=r"priority must be .* not 'urgent'"):
        schedules.create("orders", "other", every="1h", priority="urgent")


# --- the priority of a handler, and of a batch ------------------------------------------------------------------


@pytest.fixture
def urgent(orders: Bus) -> Bus:
    """A bus whose domain has a type with high priority, as the handler of a worker declared it."""
    assert orders.run(declare_priorities({("orders", "Pay"): HIGH, ("orders", "Ship"): None})) == []
    return orders


def test_senders_apply_the_priority_of_the_handler(urgent: Bus, db: Db) -> None:
    for _ in range(2):  # the second time the sender knows that there is a rule
        urgent.send("orders", "Pay")
    urgent.send("orders", "Pay", headers={"a": 1}, delay=5)
    urgent.send("orders", "Pay", unique="k")
    urgent.send_many("orders", [NewCommand("Pay"), NewCommand("Pay", command_id="mine")])
    assert set(in_bands(db).values()) == {"high"}
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE priority = 1") == 6
    sent = urgent.send("orders", "Ship")
    urgent.send_many("orders", [NewCommand("Ship")])
    assert in_bands(db)[sent.command_id] == "normal"
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE priority IS NULL") == 2


@pytest.mark.parametrize("name", ALL)
def test_the_sender_s_priority_wins(urgent: Bus, db: Db, name: Any) -> None:
    urgent.send("orders", "Pay", priority=name)
    urgent.send("orders", "Pay", priority=name, unique="k")
    urgent.send("orders", "Pay", priority=name, unique="k", on_conflict="replace")
    urgent.send_many("orders", [NewCommand("Pay", priority=name), NewCommand("Ship", priority=name)])
    urgent.create_batch("orders", [{"command_type": "Pay", "priority": name}])
    assert set(in_bands(db).values()) == {name}


def test_a_replacement_a_raw_message_and_a_firing_have_it_too(urgent: Bus, part: Any, db: Db) -> None:
    urgent.send("orders", "Ship", unique="k")
    urgent.send("orders", "Pay", unique="k", on_conflict="replace")
    send_raw(db, json.dumps({"command_type": "Pay", "command_id": "raw"}))
    send_raw(db, json.dumps({"command_type": "Pay", "command_id": "low", "priority": "low"}))
    urgent.claim()
    part("schedules").create("orders", "nightly", every="1h", command_type="Pay")
    part("schedules").run_now("orders", "nightly")
    bands = in_bands(db)
    assert bands.pop("low") == "low"
    assert len(bands) == 3
    assert set(bands.values()) == {"high"}


def test_a_batch_has_a_priority_for_its_members(urgent: Bus, db: Db) -> None:
    made = urgent.create_batch(
        "orders", [NewCommand("Ship"), NewCommand("Ship", priority="high", command_id="own")], priority="low",
        is_open=True,
    )  # fmt: skip
    urgent.add_to_batch("orders", made.batch_id, [NewCommand("Ship", command_id="later")])
    urgent.add_to_batch("orders", made.batch_id, [NewCommand("Pay", command_id="rule")])
    urgent.create_batch("orders", [NewCommand("Pay", command_id="of handler")])
    bands = in_bands(db)
    assert (bands["own"], bands["later"], bands["rule"], bands["of handler"]) == ("high", "low", "low", "high")
    assert sorted(bands.values()) == ["high", "high", "low", "low", "low"]
    with pytest.raises(InvalidCommandError, match=r"priority must be .* not 'urgent'"):
        urgent.create_batch("orders", [NewCommand("Ship")], priority="urgent")


def test_the_last_worker_to_start_says_the_priority(urgent: Bus, db: Db) -> None:
    assert urgent.run(declare_priorities({("orders", "Pay"): HIGH})) == []
    (note,) = urgent.run(declare_priorities({("orders", "Pay"): LOW}))
    assert note == "command type orders/Pay was declared with high priority before, now with low"
    urgent.send("orders", "Pay", command_id="a")
    assert in_bands(db) == {"a": "low"}
    (note,) = urgent.run(declare_priorities({("orders", "Pay"): None}))
    assert note.endswith("low priority before, now with none")
    assert one(db, "SELECT count(*) FROM commandbus.type_rule") == 0
    urgent.send("orders", "Pay", command_id="b")
    assert in_bands(db) == {"a": "low", "b": "normal"}


def test_a_rule_with_a_key_limit_and_one_with_a_priority_share_a_row(urgent: Bus, db: Db) -> None:
    db.execute(
        "UPDATE commandbus.type_rule SET key_limit = 'tenant', key_path = 'data.tenant' WHERE command_type = 'Pay'"
    )
    urgent.run(declare_priorities({("orders", "Pay"): None}))
    assert one(db, "SELECT key_limit FROM commandbus.type_rule WHERE priority IS NULL") == "tenant"
    urgent.run(declare_priorities({("orders", "Pay"): LOW}))
    assert one(db, "SELECT key_limit FROM commandbus.type_rule WHERE priority = -1") == "tenant"


@pytest.mark.parametrize("value", ["urgent", 1, ""])
def test_a_handler_s_bad_priority_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match="priority must be") as caught:
        HandlerRegistry().register("orders", "ship", lambda ctx: None, priority=value)
    assert repr(value) in str(caught.value)


# --- an operator changes it -----------------------------------------------------------------------------------


@pytest.fixture
def set_priority(part: Callable[[str], Any]) -> Callable[..., Any]:
    """Set the priority of a command, as the operator ann."""
    return lambda *what, **how: part("commands").set_priority("orders", *what, operator="ann", **how)


def test_an_operator_changes_the_priority_of_a_waiting_command(
    three: Bus, db: Db, set_priority: SetPriority
) -> None:
    assert set_priority("low", "high", reason="the customer calls") == "low"
    assert set_priority("high", "normal") == "high"
    assert in_bands(db) == {"low": "high", "high": "normal", "normal": "normal"}
    assert three.get_command("orders", "low").priority == "high"
    assert [row[3] for row in claim_band(three, "high").ready] == ["low"]
    assert [row[3] for row in claim_band(three, "normal").ready] == ["normal", "high"]  # it goes behind what waits
    (event,) = [entry for entry in three.get_audit_trail("orders", "low") if entry.event == "OPERATOR_PRIORITY"]
    assert event.details == {"operator": "ann", "reason": "the customer calls", "priority": "high"}


def test_a_delayed_command_keeps_its_time_and_a_held_one_its_lease(
    orders: Bus, db: Db, set_priority: SetPriority
) -> None:
    orders.send("orders", "Ship", command_id="later", delay=40)
    orders.send("orders", "Ship", command_id="held")
    attempt = orders.claim_one()
    for name in ("later", "held"):
        set_priority(name, "low")
    assert in_bands(db) == {"later": "low", "held": "low"}
    assert 39 < due_in(db, "later") <= 40
    assert 29 < due_in(db, "held") <= 30
    orders.renew([attempt], lease=60)
    orders.settle(fail(attempt, RuntimeError("again")))
    assert in_bands(db) == {"later": "low", "held": "low"}
    assert {row.command_id for row in orders.query_commands(priority="low").items} == {"later", "held"}
    assert orders.query_commands(priority="normal").items == []


def test_a_parked_command_has_its_new_priority_when_it_is_woken(
    three: Bus, db: Db, set_priority: SetPriority
) -> None:
    three.pause("orders", "Ship", operator="ann")
    claim_each(three)
    set_priority("low", "high")
    assert three.status("orders")[0].parked == 3
    three.resume("orders", "Ship", operator="ann")
    assert in_bands(db) == KEPT | {"low": "high"}
    assert three.status("orders")[0].ready_high == 2


def test_what_cannot_get_another_priority_says_why(three: Bus, set_priority: SetPriority) -> None:
    with pytest.raises(InvalidCommandError, match=r"priority must be .* not 'urgent'"):
        set_priority("low", "urgent")
    with pytest.raises(InvalidCommandError, match="priority must be"):
        set_priority("low", None)
    with pytest.raises(CommandNotFoundError, match="'other'"):
        set_priority("other", "high")
    attempts = claim_each(three)
    three.settle(attempts["high"].complete(None))
    three.settle(fail(attempts["low"], PermanentCommandError("no")))
    with pytest.raises(InvalidOperationError, match=r"cannot change the priority of command 'high'.*COMPLETED"):
        set_priority("high", "low")
    with pytest.raises(InvalidOperationError, match="it is in the troubleshooting queue"):
        set_priority("low", "high")
