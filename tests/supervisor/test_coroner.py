"""The coroner alone: dead workers made of claims, on a real database."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandStatus, Limit, Settings
from commandbus.db.drivers import run
from commandbus.flow.commands.claim import Claim, claim
from commandbus.flow.commands.rescue import Rule
from commandbus.model.crash_attribution import Cause, Death
from commandbus.model.retry import RetryPolicy
from commandbus.supervisor.coroner import FIRST_POSTPONED_SECONDS, Case, Coroner
from commandbus.supervisor.worker_messages import Hello
from commandbus.worker.board import SlotView
from support.waiting import one, until, verdicts

Db = psycopg.Connection[Any]
AT_ONCE = Rule(RetryPolicy(3, (0.0,), 0.0))
EXITED = Death(Cause.EXITED, exit_code=1)


@pytest.fixture
def coroner(database: str, bus: CommandBus) -> Iterator[Coroner]:
    coroner = Coroner(Settings(database_url=database), "test")
    coroner.start()
    yield coroner
    coroner.stop(5)


def take(db: Db, worker: str, n: int = 10, domain: str = "orders") -> Claim:
    """What a worker does before it dies."""
    return run(db, claim(domain=domain, worker=worker, n=n, lease_seconds=30, cursor=None))


def running(index: int, msg_id: int, read_ct: int = 1, *, ident: int = 0, domain_index: int = 0) -> SlotView:
    thread = ident or 100 + index
    return SlotView(index, domain_index, msg_id, read_ct, time.monotonic(), math.inf, thread, index, 0)


def case(database: str, worker: str, *slots: SlotView, death: Death = EXITED, domains: str = "orders") -> Case:
    hello = Hello(worker, domains.split(), {}, AT_ONCE)
    return Case(hello, death, slots, time.monotonic(), Settings(database_url=database))


def examined(coroner: Coroner, case: Case) -> Case:
    coroner.add(case)
    until(lambda: not coroner.open_cases, what="the case is not done")
    return case


def test_what_ran_is_judged_and_what_waited_is_given_back(
    coroner: Coroner, bus: CommandBus, db: Db, database: str
) -> None:
    for n in range(3):
        bus.send("orders", "ship", command_id=f"c{n}")
    take(db, "dead")
    found = examined(coroner, case(database, "dead", running(0, 1)))
    assert found.settled == {"culprit": 1, "given back": 2}
    assert [verdicts(db, f"c{n}") for n in range(3)] == [[(1, "RETRY")], [(1, "GIVEN_BACK")], [(1, "GIVEN_BACK")]]
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers IS NULL AND vt <= now()") == 3
    assert coroner.done == 1


def test_a_slot_that_shows_an_older_attempt_proves_nothing(
    coroner: Coroner, bus: CommandBus, db: Db, database: str
) -> None:
    """The board's record and the row must name the same fence, in the same domain."""
    bus.create_domain("other")
    bus.send("orders", "ship", command_id="a")
    bus.send("other", "ship", command_id="b")
    take(db, "dead")
    take(db, "dead", domain="other")
    slots = [running(0, 1, 2), running(1, 1, 1, domain_index=1), running(2, 1, 1, domain_index=9)]
    found = examined(coroner, case(database, "dead", *slots, domains="orders other"))
    assert found.settled == {"culprit": 1, "given back": 1}
    assert verdicts(db, "b") == [(1, "RETRY")]


class PoisonCase(Case):
    """One that cannot be examined."""

    def msg_ids(self, domain: str) -> list[int]:
        raise TypeError("no list of messages")


def test_a_case_that_cannot_be_examined_costs_no_other_anything(
    coroner: Coroner, bus: CommandBus, db: Db, database: str
) -> None:
    bus.send("orders", "work")
    take(db, "dead")
    usual = case(database, "dead", running(0, 1))
    poison = PoisonCase(Hello("poison", ["orders"], {}, AT_ONCE), EXITED, (), time.monotonic(), usual.settings)
    coroner.add(poison)
    until(lambda: poison.backoff.seconds >= 2 * FIRST_POSTPONED_SECONDS)
    coroner.add(usual)
    until(lambda: coroner.open_cases == [poison])
    assert usual.settled
    assert coroner.trouble is None


def test_a_worker_that_held_nothing(coroner: Coroner, database: str) -> None:
    assert examined(coroner, case(database, "dead", running(0, 77))).settled == {}


def test_what_its_predecessor_lost_and_raw_messages_are_put_right(
    coroner: Coroner, bus: CommandBus, db: Db, database: str
) -> None:
    bus.send("orders", "ship", command_id="a")
    take(db, "before")
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now()")
    raw_message = '{"command_type": "ship", "command_id": "raw"}'
    db.execute("SELECT pgmq.send('orders__commands', %s::jsonb)", (raw_message,))
    take(db, "dead")
    examined(coroner, case(database, "dead"))
    assert verdicts(db, "a") == [(1, "LOST"), (2, "GIVEN_BACK")]
    raw = bus.get_command("orders", "raw")
    assert raw is not None
    assert raw.status is CommandStatus.PENDING
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers IS NULL AND vt <= now()") == 2


def test_somebody_else_has_it_already(coroner: Coroner, bus: CommandBus, db: Db, database: str) -> None:
    bus.send("orders", "ship", command_id="a")
    take(db, "dead")
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now()")
    take(db, "heir")
    assert examined(coroner, case(database, "dead", running(0, 1))).settled == {}
    assert one(db, "SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands") == "heir"


@pytest.mark.parametrize(
    "row",
    [
        "SELECT FROM pgmq.q_orders__commands WHERE msg_id = 1 FOR UPDATE",
        "SELECT FROM commandbus.command WHERE command_id = 'c0' FOR UPDATE",
    ],
    ids=["queue row", "command row"],
)
def test_a_locked_row_holds_up_neither_its_neighbours_nor_other_cases(
    coroner: Coroner, bus: CommandBus, db: Db, database: str, row: str
) -> None:
    for n in range(3):
        bus.send("orders", "ship", command_id=f"c{n}")
    take(db, "one", 2)
    take(db, "two", 1)
    with psycopg.connect(database) as other:
        other.execute(row.encode())
        coroner.add(case(database, "one"))
        coroner.add(case(database, "two"))
        until(lambda: one(db, "SELECT count(*) = 2 FROM commandbus.attempt"))
        until(lambda: [found.worker for found in coroner.open_cases] == ["one"])
    until(lambda: not coroner.open_cases)
    assert verdicts(db, "c0") == [(1, "GIVEN_BACK")]


def test_a_cancel_that_comes_in_between_is_fulfilled(
    coroner: Coroner, bus: CommandBus, db: Db, database: str
) -> None:
    bus.send("orders", "ship", command_id="a")
    take(db, "dead")
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgmq.q_orders__commands FOR UPDATE")
        coroner.add(case(database, "dead", running(0, 1)))
        until(lambda: any(found.backoff.seconds for found in coroner.open_cases))
        other.execute(
            "UPDATE pgmq.q_orders__commands SET headers = headers || %s::jsonb", ('{"cancel": {"by": "eve"}}',)
        )
    until(lambda: not coroner.open_cases)
    record = bus.get_command("orders", "a")
    assert record is not None
    assert record.status is CommandStatus.CANCELED


def test_it_gets_over_a_lost_connection(
    coroner: Coroner, bus: CommandBus, db: Db, database: str, until_connected: Callable[[], int]
) -> None:
    bus.send("orders", "ship", command_id="a")
    take(db, "dead")
    coroner.domains = ("orders",)
    until(lambda: coroner.look.at)
    db.execute("SELECT pg_terminate_backend(%s)", (until_connected(),))
    examined(coroner, case(database, "dead", running(0, 1)))
    assert verdicts(db, "a") == [(1, "RETRY")]
    until(lambda: coroner.look.lost_since is None)


@pytest.fixture
def until_connected(db: Db) -> Callable[[], int]:
    """The coroner's own session, once it is there."""

    def look() -> int:
        pid: int = until(
            lambda: one(
                db,
                "SELECT max(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE '%%coroner'",
            )
        )
        return pid

    return look


def test_its_end_is_told(coroner: Coroner) -> None:
    """/health/ready shows what `trouble` says (`test_what_the_probes_say`)."""

    def end() -> None:
        raise SystemExit("out of order")

    coroner.order(end)
    until(lambda: coroner.trouble == "the coroner has ended: SystemExit: out of order")


@pytest.mark.parametrize("health_port", [None, 0])
def test_figures_for_metrics_are_read_only_if_somebody_can_ask_for_them(
    bus: CommandBus, database: str, health_port: int | None
) -> None:
    bus.declare_limit(Limit("docai", concurrency=2))
    coroner = Coroner(Settings(database_url=database, health_port=health_port), "test")
    coroner.domains = ("orders",)
    coroner.start()
    try:
        until(lambda: "orders" in coroner.look.domains)
        assert [limit.name for limit in coroner.look.figures.limits] == ([] if health_port is None else ["docai"])
    finally:
        coroner.stop(5)
