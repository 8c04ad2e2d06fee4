"""Whose turn it is at a limit: the line in the database, what races with it, and what it costs others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, at_once, one, sync_only

from commandbus import CommandBus, CommandStatus, HandlerRegistry, Limit, LimitTimeoutError, Worker
from commandbus.db.drivers import run
from commandbus.flow.commands.claim import claim
from commandbus.flow.limits import permits
from commandbus.flow.limits.declare import list_limits
from commandbus.limits.waker import MOST_AT_ONCE
from commandbus.model.command import NewCommand
from commandbus.model.limit_state import ApiAnswer
from commandbus.model.outcome import Failure
from commandbus.worker.execution.attempt import Attempt
from support.waiting import Stopwatch, until, verdicts, within
from support.workers import quick_settings

Db = psycopg.Connection[Any]
Start = Callable[..., Worker]
RESERVED = 15.0
pytestmark = sync_only


@pytest.fixture
def start(database: str) -> Iterator[Start]:
    """Starts workers in this process: `start(handlers, domains=[…])`."""
    started: list[Worker] = []

    def start(handlers: HandlerRegistry, *, domains: list[str] | None = None, **changes: Any) -> Worker:
        worker = Worker(handlers, domains=domains, settings=quick_settings(database, **changes), name="test")
        worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.is_running:
            worker.stop(wait=4)


def work_in(db: Db, *domains: str) -> None:
    """As if a worker of these domains were alive."""
    db.execute(
        "INSERT INTO commandbus.worker (id, host, pid, domains, concurrency, version, state) "
        "VALUES ('w1', 'here', 1, %s, 4, '0', 'ACTIVE') ON CONFLICT (id) DO UPDATE "
        "SET domains = excluded.domains, heartbeat_at = now()",
        [list(domains)],
    )


def park(
    orders: Bus, count: int, *, limit: str = "docai", domain: str = "orders", kind: str = "page"
) -> list[str]:
    """Send commands, and park them as a worker does; their ids in their order."""
    sent = orders.send_many(domain, [NewCommand(kind, n) for n in range(count)])
    attempts: list[Attempt] = []
    while len(attempts) < count:
        attempts += orders.claim(domain=domain, n=500)
    full = Failure("Limit", "LIMIT_FULL", "full")
    for begin in range(0, count, 500):
        part = attempts[begin : begin + 500]
        orders.settle([attempt.park(limit, full, "full", until=None) for attempt in part])
    return [item.command_id for item in sent]


def woken(db: Db) -> list[str]:
    """The ids of commands whose turn has come, in the order of their turns."""
    rows = db.execute(
        "SELECT c.command_id FROM commandbus.parked p JOIN commandbus.command c ON c.id = p.command "
        "WHERE p.woken_at IS NOT NULL ORDER BY p.since, p.command"
    )
    return [command_id for (command_id,) in rows]


def holders(db: Db) -> dict[str, float]:
    found = one(
        db,
        "SELECT COALESCE(jsonb_object_agg(key, value), '{}') FROM commandbus.limits, jsonb_each(holders) "
        "WHERE value::float8 > extract(epoch FROM clock_timestamp())",
    )
    assert isinstance(found, dict)
    return found


def wake(conn: Db, mark: str = "turn/", most: int = 20) -> int:
    """As a limit client does."""
    return run(conn, permits.wake("docai", most=most, seconds=RESERVED, grant=None, mark=mark)).count


# --- whose turn ------------------------------------------------------------------------------------------------


def test_permits_are_kept_for_the_first_in_line(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=3))
    work_in(db, "orders")
    park(orders, 10)
    ids = [item for (item,) in db.execute("SELECT command_id FROM commandbus.command ORDER BY id")]
    assert wake(db) == 3
    assert woken(db) == ids[:3]
    assert len(holders(db)) == 3
    assert set(holders(db)) == {
        token for (token,) in db.execute("SELECT token FROM commandbus.parked WHERE woken_at IS NOT NULL")
    }
    # They can be claimed, and nobody else.
    assert {attempt.command_id for attempt in orders.claim("w2")} == set(ids[:3])
    assert wake(db) == 0


def test_two_limit_clients_that_wake_at_once_never_wake_more_than_there_are_permits(
    orders: Bus, db: Db, database: str
) -> None:
    orders.declare_limit(Limit("docai", concurrency=4))
    work_in(db, "orders")
    park(orders, 40)
    connections = [psycopg.connect(database, autocommit=True) for _ in range(8)]
    try:
        for turn in range(6):
            answers = at_once([partial(wake, conn, f"t{turn}-{n}/") for n, conn in enumerate(connections)])
            assert all(isinstance(answer, int) for answer in answers), answers
            assert sum(answers) == 4  # type: ignore[arg-type]
            assert len(holders(db)) == 4
            assert len(woken(db)) == 4 * (turn + 1)
            run(db, permits.release("docai", list(holders(db)), good=True))
            assert holders(db) == {}
    finally:
        for conn in connections:
            conn.close()
    order = [
        n
        for (n,) in db.execute(
            "SELECT command FROM commandbus.parked WHERE woken_at IS NOT NULL ORDER BY woken_at, command"
        )
    ]
    assert order == sorted(order)


def test_newcomers_and_a_limit_client_that_wakes_never_take_more_than_there_are_permits(
    orders: Bus, db: Db, database: str
) -> None:
    orders.declare_limit(Limit("docai", concurrency=3))
    work_in(db, "orders")
    park(orders, 20)
    connections = [psycopg.connect(database, autocommit=True) for _ in range(8)]
    try:
        for turn in range(8):
            jobs: list[Callable[[], Any]] = [
                partial(wake, conn, f"t{turn}-{n}/") for n, conn in enumerate(connections[:3])
            ]
            jobs += [
                partial(run, conn, permits.take("docai", [f"new{turn}-{n}"]))
                for n, conn in enumerate(connections[3:])
            ]
            answers = at_once(jobs)
            assert not [answer for answer in answers if isinstance(answer, BaseException)], answers
            assert len(holders(db)) <= 3
            run(db, permits.release("docai", list(holders(db))))
    finally:
        for conn in connections:
            conn.close()


def test_newcomers_take_nothing_while_somebody_waits(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=3))
    work_in(db, "orders")
    park(orders, 1)
    assert run(db, permits.take("docai", ["a"])) == []
    assert run(db, permits.take("docai", ["a", "b"])) == []
    assert wake(db) == 1
    assert run(db, permits.take("docai", ["a", "b", "c"])) == ["a", "b"]


def test_a_command_that_is_parked_again_keeps_its_turn(orders: Bus, db: Db) -> None:
    """Its reservation ran out before somebody had a slot for it: it is first in line again."""
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    park(orders, 5)
    assert wake(db) == 1
    (first,) = woken(db)
    attempt = orders.claim_one("w2")
    assert attempt.command_id == first
    db.execute("UPDATE commandbus.limits SET holders = jsonb_build_object('somebody', 9e9)")
    (turn,) = run(db, permits.turns("orders", [(attempt.msg_id, attempt.id, 0)])).values()
    assert turn.limit == "docai"
    assert run(db, permits.renew("docai", [turn.token or ""])) == [turn.token]
    orders.settle(attempt.park("docai", Failure("Limit", "LIMIT_FULL", "full"), "full", until=None), "w2")
    db.execute("UPDATE commandbus.limits SET holders = '{}'")
    assert wake(db) == 1
    assert woken(db) == [first]


# --- what races with a wake ------------------------------------------------------------------------------------


def test_a_cancel_that_races_with_a_wake(orders: Bus, db: Db, database: str) -> None:
    """Whichever comes first: it is canceled, and its permit is free for the next one."""
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    ids = park(orders, 40)
    connections = [psycopg.connect(database, autocommit=True) for _ in range(2)]
    try:
        with CommandBus(database) as other:
            for turn in range(10):
                first = db.execute(
                    "SELECT c.command_id FROM commandbus.parked p JOIN commandbus.command c ON c.id = p.command "
                    "WHERE p.woken_at IS NULL ORDER BY p.since, p.command LIMIT 1"
                ).fetchone()
                assert first is not None
                answers = at_once(
                    [
                        partial(wake, connections[0], f"a{turn}/"),
                        partial(other.cancel, "orders", first[0], operator="ann"),
                        partial(wake, connections[1], f"b{turn}/"),
                    ]
                )
                assert not [answer for answer in answers if isinstance(answer, BaseException)], answers
                assert orders.get_command("orders", first[0]).status is CommandStatus.CANCELED
                assert len(holders(db)) <= 1
                # A permit that was kept for the canceled one is free when its time is over; here, at once.
                db.execute("UPDATE commandbus.limits SET holders = '{}'")
                db.execute("DELETE FROM commandbus.parked WHERE woken_at IS NOT NULL")
    finally:
        for conn in connections:
            conn.close()
    left = [orders.get_command("orders", item).status for item in ids]
    assert left.count(CommandStatus.CANCELED) == 10


def test_a_cancel_under_way_is_passed_over_and_does_not_hold_up_the_line(
    orders: Bus, db: Db, database: str
) -> None:
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    park(orders, 3)
    msg_ids = [n for (n,) in db.execute("SELECT msg_id FROM commandbus.parked ORDER BY since, command")]
    with psycopg.connect(database) as canceling:
        canceling.execute("SELECT FROM pgmq.q_orders__commands WHERE msg_id = %s FOR UPDATE", [msg_ids[0]])
        db.execute("SET statement_timeout = '5s'")
        assert wake(db) == 1
        canceling.rollback()
    found = [n for (n,) in db.execute("SELECT msg_id FROM commandbus.parked WHERE woken_at IS NOT NULL")]
    assert found == [msg_ids[1]]


def test_callers_that_come_later_do_not_wait_for_a_permit_that_is_reserved_in_vain(orders: Bus, db: Db) -> None:
    """They may have all the slots, so that nobody can claim the command that it is reserved for."""
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    park(orders, 1)
    assert wake(db) == 1
    assert len(holders(db)) == 1
    db.execute(
        "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since, token, "
        "give_up_at) VALUES ('', '', 7, 0, 'call', 'docai', now(), 'caller/7', now() + interval '1 minute')"
    )
    assert wake(db) == 0, "it may still be claimed at once"
    db.execute("UPDATE commandbus.parked SET woken_at = woken_at - interval '1 second' WHERE domain = 'orders'")
    assert wake(db) == 1
    assert one(db, "SELECT woken_at IS NOT NULL FROM commandbus.parked WHERE domain = ''")
    assert set(holders(db)) == {"caller/7"}


def test_rows_without_a_message_do_not_hold_up_the_line(orders: Bus, db: Db) -> None:
    """Whatever left them behind: more of them than are looked at in one go, all before everybody else."""
    orders.declare_limit(Limit("docai", concurrency=2))
    work_in(db, "orders")
    ids = park(orders, 3)
    db.execute(
        "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since) "
        "SELECT 'orders', 'page', 1000000 + n, 1, 'limit', 'docai', now() - interval '1 day' "
        "FROM generate_series(1, 30) n"
    )
    client_wakes(db)
    assert len(set(woken_ids(db)) & set(ids)) == 2


def woken_ids(db: Db) -> list[str]:
    rows = db.execute(
        "SELECT c.command_id FROM commandbus.parked p JOIN commandbus.command c ON c.msg_id = p.msg_id "
        "WHERE p.woken_at IS NOT NULL AND p.msg_id < 1000000"
    )
    return [command_id for (command_id,) in rows]


def client_wakes(db: Db) -> None:
    """What gates do in some seconds: sweeps, and a wake at each limit that somebody waits for."""
    for n in range(5):
        swept = run(db, permits.sweep())
        for name in swept.limits:
            assert name == "docai"
            wake(db, f"g{n}/", MOST_AT_ONCE)


# --- domains that nobody serves --------------------------------------------------------------------------------


def test_a_paused_domains_parked_commands_do_not_hold_up_others(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=1))
    orders.create_domain("slow")
    work_in(db, "orders", "slow")
    park(orders, 30, domain="slow")
    (later,) = park(orders, 1)
    orders.pause("slow", operator="ann")
    assert wake(db) == 1
    assert woken(db) == [later]
    run(db, permits.release("docai", list(holders(db))))
    assert wake(db) == 0
    assert run(db, permits.take("docai", ["new"])) == ["new"]
    run(db, permits.release("docai", ["new"]))
    orders.resume("slow")
    assert run(db, permits.take("docai", ["new"])) == []
    assert wake(db) == 1


def test_a_paused_types_parked_commands_do_not_hold_up_others(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    park(orders, 3, kind="slow")
    (later,) = park(orders, 1)
    orders.pause("orders", "slow", operator="ann")
    assert wake(db) == 1
    assert woken(db) == [later]


def test_a_domain_without_workers_does_not_hold_up_others(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=1))
    orders.create_domain("left")
    work_in(db, "orders")
    park(orders, 30, domain="left")
    assert wake(db) == 0
    assert run(db, permits.take("docai", ["new"])) == ["new"]
    run(db, permits.release("docai", ["new"]))
    (later,) = park(orders, 1)
    assert wake(db) == 1
    assert woken(db) == [later]
    # The worker comes back: it is their turn, before who comes then.
    work_in(db, "orders", "left")
    assert run(db, permits.take("docai", ["new"])) == []


def test_a_worker_that_died_does_not_hold_up_others(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    park(orders, 3)
    db.execute("UPDATE commandbus.worker SET heartbeat_at = now() - interval '1 minute'")
    assert wake(db) == 0
    assert run(db, permits.take("docai", ["new"])) == ["new"]


def test_after_a_pause_parked_commands_run(orders: Bus, db: Db, start: Start) -> None:
    handlers = HandlerRegistry()
    go = threading.Event()

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> None:
        go.wait(20)

    start(handlers)
    orders.send_many("orders", [NewCommand("page", n) for n in range(6)])
    until(lambda: orders.status("orders")[0].parked == 5)
    orders.pause("orders", operator="ann")
    go.set()
    until(lambda: orders.status("orders")[0].running == 0)
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") < 6
    orders.resume("orders")
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 6)


# --- what is lost on the way -----------------------------------------------------------------------------------


def test_a_probe_whose_turn_came_before_a_late_429_makes_room_for_another(
    orders: Bus, db: Db, start: Start
) -> None:
    """The API said "at once"; the first in line was woken to find out; then an older call was refused as well."""
    orders.declare_limit(Limit("docai", concurrency=5, breaker_failures=0))
    work_in(db, "orders")
    sent = park(orders, 2)
    refused = partial(permits.answer, "docai", None, ApiAnswer.RATE_LIMITED, gives=False, retry_after=0.0)
    run(db, refused())
    run(db, permits.wake("docai", most=MOST_AT_ONCE, seconds=RESERVED, grant=None, mark="turn/"))
    assert woken(db) == sent[:1]
    run(db, refused())
    handlers = HandlerRegistry()
    handlers.register("orders", "page", lambda ctx: "read", limits=["docai"])
    start(handlers)
    within(
        RESERVED / 2,
        lambda: all(orders.get_command("orders", item).status is CommandStatus.COMPLETED for item in sent),
    )


def test_the_sweep_repairs_a_lost_wake(orders: Bus, db: Db, start: Start) -> None:
    """A permit became free, and who freed it died before the next one was told: nobody else will tell."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "page", limits=["docai"])
    def page(command: Any, ctx: Any) -> None:
        return None

    orders.declare_limit(Limit("docai", concurrency=1))
    db.execute("UPDATE commandbus.limits SET holders = '{\"dead\": 9e9}'")
    start(handlers)
    sent = orders.send("orders", "page")
    until(lambda: orders.status("orders")[0].parked == 1)
    db.execute("UPDATE commandbus.limits SET holders = '{}'")
    until(lambda: orders.get_command("orders", sent.command_id).status is CommandStatus.COMPLETED, 10)
    assert verdicts(db, sent.command_id) == [(1, "PARKED")]


def test_the_sweep_finds_a_turn_that_was_not_heard(orders: Bus, database: str, db: Db) -> None:
    """A caller's token was told while its limit client was deaf."""
    with CommandBus(database) as bus:
        bus.declare_limit(Limit("docai", concurrency=1))
        got = threading.Event()

        def wait() -> None:
            with bus.limit("docai", wait=30):
                got.set()

        db.execute("UPDATE commandbus.limits SET holders = '{\"dead\": 9e9}'")
        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: one(db, "SELECT count(*) FROM commandbus.parked") == 1)
        db.execute(
            "WITH turn AS (UPDATE commandbus.parked SET woken_at = now() RETURNING token) "
            "UPDATE commandbus.limits SET holders = jsonb_build_object((SELECT token FROM turn), "
            "extract(epoch FROM now()) + 15)"
        )
        assert got.wait(60)
        waiting.join(10)


def test_a_limit_client_that_died_between_reserving_and_waking_costs_one_reservation(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    park(orders, 2)
    run(db, permits.take("docai", ["turn/dead/1"], seconds=0.3, newcomers=False))
    assert wake(db) == 0
    until(lambda: wake(db) == 1)


def test_callers_that_gave_up_are_forgotten(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    run(db, permits.line_up("docai", "gone", number=7, seconds=0.0, who="a program that was killed"))
    (later,) = park(orders, 1)
    assert wake(db) == 1
    assert woken(db) == [later]
    db.execute("UPDATE commandbus.parked SET give_up_at = now() - interval '1 minute' WHERE domain = ''")
    run(db, permits.sweep())
    assert one(db, "SELECT count(*) FROM commandbus.parked WHERE domain = ''") == 0


# --- what it costs ---------------------------------------------------------------------------------------------


def plan_of(conn: Db, statement: Any) -> dict[str, Any]:
    """The plan that was run, and undone."""
    with conn.transaction(force_rollback=True):
        row = conn.execute(
            b"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + statement.sql, statement.params, prepare=False
        ).fetchone()
    assert row is not None
    found = row[0][0]["Plan"]
    assert isinstance(found, dict)
    return found


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan] + [item for part in plan.get("Plans", []) for item in nodes(part)]


def visited(plan: dict[str, Any], relation: str) -> float:
    """Rows of a relation that were looked at."""
    return sum(
        (item["Actual Rows"] + item.get("Rows Removed by Filter", 0)) * item["Actual Loops"]
        for item in nodes(plan)
        if item.get("Relation Name") == relation
    )


@pytest.mark.parametrize("waiting_for", ["docai", "other"])
def test_2000_parked_commands_cost_newcomers_a_look_at_one(orders: Bus, db: Db, waiting_for: str) -> None:
    orders.declare_limit(Limit("docai", concurrency=3))
    orders.declare_limit(Limit("other", concurrency=3))
    work_in(db, "orders")
    park(orders, 2000, limit=waiting_for)
    db.execute("ANALYZE commandbus.parked")
    for operation in (
        permits.take("docai", ["a"]),
        permits.take("docai", ["a", "b"]),
        permits.release("docai", ["a"]),
        list_limits("docai"),
    ):
        plan = plan_of(db, next(operation.steps))
        scans = [item for item in nodes(plan) if item.get("Relation Name") == "parked"]
        assert scans
        assert visited(plan, "parked") <= 1, json.dumps(plan)[:2000]
        if waiting_for == "other":
            assert {item.get("Index Name") for item in scans} == {"parked_limit"}


def test_a_wake_looks_at_no_more_than_it_may_wake(orders: Bus, db: Db) -> None:
    orders.declare_limit(Limit("docai", concurrency=3))
    work_in(db, "orders")
    park(orders, 2000)
    db.execute("ANALYZE commandbus.parked")
    steps = permits.wake("docai", most=20, seconds=RESERVED, grant=None, mark="t/").steps
    with db.transaction(force_rollback=True):
        statement = next(steps)
        rows = db.execute(statement.sql, statement.params).fetchall()
        plan = plan_of(db, steps.send(rows))
    assert visited(plan, "parked") <= 21, json.dumps(plan)[:2000]


def test_2000_parked_commands_of_a_paused_domain_cost_newcomers_no_more(orders: Bus, db: Db) -> None:
    """They cannot have a turn: nobody asks that of each of them again."""
    orders.declare_limit(Limit("docai", concurrency=3))
    orders.create_domain("slow")
    work_in(db, "orders", "slow")
    park(orders, 2000, domain="slow")
    orders.pause("slow", operator="ann")
    db.execute("ANALYZE commandbus.parked")
    plan = plan_of(db, next(permits.take("docai", ["a", "b"]).steps))
    assert visited(plan, "parked") <= 2000
    assert visited(plan, "worker") + visited(plan, "pause") <= 100, "once for each domain, not for each command"


def test_parked_commands_do_not_slow_claims(orders: Bus, db: Db) -> None:
    """What is parked is out of the queue's sight: a claim visits what it claims."""
    orders.declare_limit(Limit("docai", concurrency=3))
    work_in(db, "orders")
    park(orders, 2000)
    db.execute("VACUUM ANALYZE pgmq.q_orders__commands")
    orders.send_many("orders", [NewCommand("other", n) for n in range(20)])
    plan = plan_of(db, next(claim(domain="orders", worker="w1", n=20, lease_seconds=30, cursor=None).steps))
    assert visited(plan, "q_orders__commands") <= 200, json.dumps(plan)[:3000]
    assert len(orders.claim("w3", 50)) == 20


def test_wait_0_beside_many_parked_is_refused_at_once(orders: Bus, db: Db, database: str) -> None:
    orders.declare_limit(Limit("docai", concurrency=1))
    work_in(db, "orders")
    park(orders, 500)
    with CommandBus(database) as bus:
        stopwatch = Stopwatch()
        with pytest.raises(LimitTimeoutError), bus.limit("docai", wait=0):
            raise AssertionError("others were before")
        assert stopwatch.seconds() < 2
