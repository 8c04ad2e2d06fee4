"""Breakers and what workers count: a type is in trouble only as a part of all that ended in the fleet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from breaker_harness import THREE, Db, actions, failed, state, stuck, tell
from flow_harness import Bus, one

from commandbus.flow.breakers.breaker import Judged, judge, watch
from commandbus.flow.workers.registry import WorkerIdentity, beat
from commandbus.model.breaker import Breaker
from commandbus.model.breaker_rule import AttemptCounts, moments


def heartbeat(bus: Bus, worker: str, counts: Mapping[str, Any] | None = None, state: str = "ACTIVE") -> None:
    """A worker of the domain says that it lives."""
    identity = WorkerIdentity(worker, "host", 1, ["orders"], 10, "1")
    bus.run(beat(identity, state=state, running=0, settled=0, rates={}, counts=counts))


def says(bus: Bus, worker: str, others: int | None, state: str = "ACTIVE", kind: str = "Ship") -> None:
    """It tells what it has counted since each bad attempt that it knows of."""
    recent = bus.run(watch(["orders"])).recent["orders", kind]
    since = moments(recent)
    tally = AttemptCounts(recent[-1].ended, since, [others] * len(since))
    heartbeat(bus, worker, {f"orders/{kind}": tally.to_json()}, state)


def judged(bus: Bus, rule: Breaker = THREE) -> Judged:
    found: Judged = bus.run(judge("orders", "Ship", rule))
    return found


def impatient(db: Db) -> None:
    """As if everybody had had the time to tell."""
    db.execute(
        "UPDATE commandbus.breaker SET recent = (SELECT jsonb_agg(jsonb_build_array("
        "x -> 0, x -> 1, x -> 2, (x ->> 3)::float8 - 11)) FROM jsonb_array_elements(recent) x)"
    )


def test_nobody_knows_until_every_live_worker_has_told(orders: Bus, db: Db) -> None:
    for worker in ("w1", "w2"):
        heartbeat(orders, worker)
    assert tell(orders, stuck(), stuck(), stuck()) is None
    assert judged(orders) == Judged(None, is_final=False)
    says(orders, "w1", 1)
    assert judged(orders) == Judged(None, is_final=False)
    says(orders, "w2", 1)
    found = judged(orders)
    assert found.is_final
    assert found.moved is not None
    assert "3 of 5 attempts stuck since " in found.moved.reason
    assert "the last: ExecutionStuck: it hangs" in found.moved.reason
    assert state(db) == "OPEN"


def test_those_that_end_otherwise_anywhere_keep_it_closed(orders: Bus, db: Db) -> None:
    for worker in ("w1", "w2"):
        heartbeat(orders, worker)
    tell(orders, stuck(), stuck(), stuck())
    says(orders, "w1", 0)
    says(orders, "w2", 1000)
    assert judged(orders) == Judged(None, is_final=True)
    (info,) = orders.breakers()
    assert (info.state, info.stuck, info.others) == ("CLOSED", 3, 1000)
    assert info.reason == "the last: ExecutionStuck: it hangs"
    says(orders, "w2", None)
    assert judged(orders) == Judged(None, is_final=True), "more than it remembers"
    assert actions(db) == []


def test_counts_from_before_the_last_bad_attempt_do_not_do(orders: Bus) -> None:
    heartbeat(orders, "w1")
    tell(orders, stuck())
    says(orders, "w1", 500)
    tell(orders, stuck(), stuck())
    assert judged(orders) == Judged(None, is_final=False)


def test_bad_attempts_that_keep_coming_do_not_put_the_verdict_off(orders: Bus, db: Db) -> None:
    """There is always one that is newer than what the workers have told: those before it are judged."""
    heartbeat(orders, "w1")
    tell(orders, stuck(), stuck(), stuck())
    says(orders, "w1", 3)
    assert tell(orders, stuck()) is not None
    assert state(db) == "OPEN"
    orders.close_breaker("orders", "Ship")
    tell(orders, stuck(), stuck(), stuck())
    says(orders, "w1", 4)
    assert tell(orders, stuck()) is None
    assert judged(orders) == Judged(None, is_final=False), "the fourth has to be told of"
    says(orders, "w1", 5)
    assert judged(orders) == Judged(None, is_final=True)


def test_one_that_does_not_tell_is_waited_for_only_for_a_while(orders: Bus, db: Db) -> None:
    heartbeat(orders, "silent")
    tell(orders, stuck(), stuck(), stuck())
    assert not judged(orders).is_final
    impatient(db)
    assert judged(orders).moved is not None


def test_the_dead_and_the_stopped_are_not_waited_for_and_what_they_told_counts(orders: Bus, db: Db) -> None:
    heartbeat(orders, "gone")
    tell(orders, stuck(ago=30.0), stuck(ago=30.0), stuck(ago=30.0))
    says(orders, "gone", 4, "STOPPED")
    assert judged(orders) == Judged(None, is_final=True)
    db.execute("UPDATE commandbus.worker SET state = 'ACTIVE', heartbeat_at = now() - interval '20 s'")
    assert judged(orders) == Judged(None, is_final=True), "it has died in silence"
    db.execute("UPDATE commandbus.worker SET heartbeat_at = now() - interval '40 s'")
    assert judged(orders).moved is not None, "it was gone before the first of them began"


def test_workers_of_other_domains_have_no_say(orders: Bus) -> None:
    identity = WorkerIdentity("elsewhere", "host", 1, ["billing"], 10, "1")
    orders.run(beat(identity, state="ACTIVE", running=0, settled=0, rates={}))
    assert tell(orders, stuck(), stuck(), stuck()) is not None


def test_failures_are_a_part_of_what_ended_too(orders: Bus, db: Db) -> None:
    rule = Breaker(stuck=0, failures=4)
    heartbeat(orders, "w1")
    assert tell(orders, *[failed() for _ in range(4)], rule=rule) is None
    says(orders, "w1", 9)
    assert judged(orders, rule) == Judged(None, is_final=True)
    says(orders, "w1", 8)
    found = judged(orders, rule)
    assert found.moved is not None
    assert "4 of 8 attempts failed since" in found.moved.reason
    assert state(db) == "OPEN"


def test_what_was_counted_is_watched_only_within_the_window(orders: Bus, db: Db) -> None:
    tell(orders, stuck(), rule=Breaker(window=1.0))
    seen = orders.run(watch(["orders"]))
    assert list(seen.recent) == [("orders", "Ship")]
    assert abs(seen.now - time.time()) < 60
    db.execute("UPDATE commandbus.breaker SET counted_until = now() - interval '1 ms'")
    assert orders.run(watch(["orders"])).recent == {}
    assert orders.run(watch(["billing"])).recent == {}


def test_judging_does_not_wait_for_who_holds_the_breaker(orders: Bus, db: Db) -> None:
    tell(orders, stuck(), rule=THREE)
    with db.transaction():
        db.execute("SELECT FROM commandbus.breaker FOR UPDATE")
        assert judged(orders) == Judged(None, is_final=False)
    assert one(db, "SELECT count(*) FROM commandbus.breaker") == 1
    assert orders.run(judge("orders", "Nothing", THREE)).moved is None
