"""What a limit allows: declared by code, changed by people while work runs, and how long one would wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, sync_only

from commandbus import (
    CommandBusError,
    CommandNotFoundError,
    CommandStatus,
    ConfigurationError,
    HandlerRegistry,
    InvalidOperationError,
    Limit,
    RateLimitError,
    Settings,
    UnknownLimitError,
    Worker,
)
from commandbus.db.drivers import run
from commandbus.flow.commands.operate import operator_action
from commandbus.flow.limits.declare import LimitLocation, declare, set_limit
from commandbus.model.command import NewCommand
from support.waiting import one, until
from support.workers import quick_settings

Db = psycopg.Connection[Any]
Start = Callable[..., Worker]


@pytest.fixture
def start(database: str) -> Iterator[Start]:
    """Starts workers in this process: `start(handlers, concurrency=8)`."""
    started: list[Worker] = []

    def start(handlers: HandlerRegistry, **changes: Any) -> Worker:
        worker = Worker(handlers, settings=quick_settings(database, **changes), name="test")
        worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.is_running:
            worker.stop(wait=4)


class Calls:
    """Calls that last until they are let go, and how many there are at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.go = threading.Event()
        self.now = 0
        self.most = 0
        self.total = 0

    def __call__(self) -> None:
        with self._lock:
            self.now += 1
            self.total += 1
            self.most = max(self.most, self.now)
        self.go.wait(60)
        with self._lock:
            self.now -= 1


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Let go at the end of the test."""
    calls = Calls()
    yield calls
    calls.go.set()


@pytest.fixture
def handlers(calls: Calls) -> HandlerRegistry:
    """A handler of `orders/page` that needs a permit of docai."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "page", limits=["docai"])
    def page(command: Any, ctx: Any) -> None:
        calls()

    return handlers


def actions(db: Db, subject: str = "limit docai") -> list[tuple[Any, ...]]:
    return db.execute(
        "SELECT action, operator, reason, details FROM commandbus.control_action WHERE subject = %s ORDER BY id",
        [subject],
    ).fetchall()


# --- declared, and set -----------------------------------------------------------------------------------------


def test_a_declared_limit_is_known_to_all(bus: Bus, db: Db) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, rate="120/m", burst=3))
    found = bus.get_limit("docai")
    assert (found.concurrency, found.rate, found.burst, found.lease_seconds) == (5, "120/m", 3, 120)
    assert {"concurrency": 5, "rate": "120/m", "burst": 3}.items() <= dict(found.declared or {}).items()
    assert found.override is None
    assert (found.state, found.in_use, found.parked, found.store) == ("AVAILABLE", 0, 0, "postgres")
    assert [item.name for item in bus.limits()] == ["docai"]
    assert actions(db) == []  # nobody has done anything to it


def test_what_is_set_lies_above_what_is_declared_over_deployments(bus: Bus) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, rate="120/m"))
    bus.set_limit("docai", concurrency=2)
    assert (bus.get_limit("docai").concurrency, bus.get_limit("docai").rate) == (2, "120/m")
    bus.declare_limit(Limit("docai", concurrency=50, rate="60/m"))  # a deployment
    found = bus.get_limit("docai")
    assert (found.concurrency, found.rate) == (2, "60/m")
    assert found.override == {"concurrency": 2}
    bus.unset_limit("docai")
    assert bus.get_limit("docai").concurrency == 50


def test_some_options_can_be_unset_alone(bus: Bus) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    bus.set_limit("docai", concurrency=2, rate="10/s", burst=4)
    found = bus.unset_limit("docai", "concurrency")
    assert found is not None
    assert (found.concurrency, found.rate, found.burst) == (5, "10/s", 4)
    found = bus.unset_limit("docai", "rate", "burst")
    assert (found.concurrency, found.rate, found.burst, found.override) == (5, None, 1, None)


def test_a_limit_that_only_a_person_has_made_is_gone_when_it_is_unset(bus: Bus, db: Db) -> None:
    bus.set_limit("docai", concurrency=2)
    assert bus.get_limit("docai").declared is None
    assert bus.unset_limit("docai") is None
    assert bus.get_limit("docai") is None
    with pytest.raises(UnknownLimitError, match="docai"):
        bus.unset_limit("docai")
    assert [action for action, *_ in actions(db)] == ["SET", "UNSET"]


def test_a_limit_that_somebody_waits_for_cannot_be_unset_away(
    orders: Bus, db: Db, start: Start, handlers: HandlerRegistry, calls: Calls
) -> None:
    orders.set_limit("docai", concurrency=1)
    start(handlers)
    orders.send_many("orders", [NewCommand("page", n) for n in range(3)])
    until(lambda: orders.status("orders")[0].parked == 2)
    with pytest.raises(InvalidOperationError, match="commands wait for it"):
        orders.unset_limit("docai")
    assert orders.get_limit("docai").concurrency == 1
    assert [action for action, *_ in actions(db)] == ["SET"]


def test_who_did_what_to_a_limit_is_written_down(bus: Bus, db: Db) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    bus.set_limit("docai", concurrency=2, rate="1/s", operator="ann", reason="their quota was cut")
    bus.unset_limit("docai", "rate", operator="bob", reason="back to normal")
    bus.unset_limit("docai", operator="bob")
    assert actions(db) == [
        ("SET", "ann", "their quota was cut", {"concurrency": 2, "rate": "1/s"}),
        ("UNSET", "bob", "back to normal", ["rate"]),
        ("UNSET", "bob", None, None),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"lease": timedelta(seconds=30)},
        {"lease": "30s"},
        {"max_wait": timedelta(minutes=5)},
        {"backoff": (1, 2, 3)},
        {"backoff": ["1s", timedelta(seconds=2)]},
        {"rate": "5/10s"},
        {"breaker_reset": timedelta(seconds=5)},
        {"concurrency": None, "rate": "2/s"},
    ],
    ids=str,
)
def test_whatever_can_be_set_can_be_read_again(bus: Bus, options: dict[str, Any]) -> None:
    """By everybody: a row that cannot be read would end the gates of all workers."""
    bus.declare_limit(Limit("docai", concurrency=5))
    bus.set_limit("docai", **options)
    found = bus.get_limit("docai")
    expected = Limit("docai", **{"concurrency": 5} | options)
    assert (found.lease_seconds, found.max_wait_seconds) == (expected.lease_seconds, expected.max_wait_seconds)
    assert (found.concurrency, found.rate) == (expected.concurrency, expected.rate and str(expected.rate))
    bus.set_limit("docai", burst=2)
    bus.declare_limit(Limit("docai", concurrency=6))
    assert bus.get_limit("docai").burst == 2


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": -5},
        {"concurrency": True},
        {"concurrency": 2.5},
        {"concurrency": "5"},
        {"concurrency": 10**30},
        {"concurrency": None},
        {"rate": "fast"},
        {"rate": "0/s"},
        {"lease": 0},
        {"lease": float("nan")},
        {"lease": float("inf")},
        {"backoff": []},
        {"backoff": "2"},
        {"breaker_failures": -1},
        {"store": "memory"},
        {"environment": "a{b}"},
        {"concurency": 5},
        {"tries": 0},
    ],
    ids=str,
)
def test_a_hostile_value_is_refused_and_changes_nothing(bus: Bus, db: Db, options: dict[str, Any]) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    with pytest.raises((ConfigurationError, InvalidOperationError), match=next(iter(options))):
        bus.set_limit("docai", **options)
    found = bus.get_limit("docai")
    assert (found.concurrency, found.override) == (5, None)
    assert actions(db) == []


@pytest.mark.parametrize(
    "name", ["", "Docai", "a b", "x" * 49, "docai\n", "';DROP TABLE commandbus.limits;--", None]
)
def test_a_hostile_name_is_refused(bus: Bus, db: Db, name: Any) -> None:
    for change in (
        lambda: bus.set_limit(name, concurrency=1),
        lambda: bus.unset_limit(name),
        lambda: bus.declare_limit(Limit(name, concurrency=1)),
    ):
        with pytest.raises(ConfigurationError, match="is not the name of a limit"):
            change()
    assert bus.limits().items == []


def test_unsetting_what_is_no_option_is_refused(bus: Bus, db: Db) -> None:
    """A slip of the pen is not an answer "done"."""
    bus.declare_limit(Limit("docai", concurrency=5))
    bus.set_limit("docai", concurrency=2)
    with pytest.raises(ConfigurationError, match="concurency"):
        bus.unset_limit("docai", "concurency")
    assert bus.get_limit("docai").concurrency == 2
    assert len(actions(db)) == 1


def test_a_limit_cannot_be_moved_to_a_redis_that_nobody_has(bus: Bus) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    with pytest.raises(CommandBusError, match="redis_url"):
        bus.set_limit("docai", store="redis")
    assert bus.get_limit("docai").store == "postgres"


@sync_only
def test_a_deployment_does_not_forget_what_a_person_sets_at_that_moment(bus: Bus, database: str, db: Db) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    home = LimitLocation("test", "postgres")
    with psycopg.connect(database) as person, psycopg.connect(database, autocommit=True) as deployment:
        # All that a person's set_limit does, but for its commit.
        setting = set_limit("docai", {"concurrency": 2}, home, operator_action("ann", None, "CANCEL"))
        run(person, replace(setting, atomic=False))
        begins = threading.Thread(target=lambda: run(deployment, declare([Limit("docai", concurrency=50)], home)))
        begins.start()
        waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock')"
        until(lambda: one(db, waits, deployment.info.backend_pid) or not begins.is_alive())
        person.commit()
        begins.join(20)
        assert not begins.is_alive()
    found = bus.get_limit("docai")
    assert dict(found.declared or {})["concurrency"] == 50
    assert (found.concurrency, found.override) == (2, {"concurrency": 2})


@sync_only
def test_many_workers_that_declare_at_once_do_not_disturb_each_other(bus: Bus, database: str) -> None:
    declared = [Limit(f"l{n}", concurrency=n + 1) for n in range(8)]
    errors: list[BaseException] = []
    ready = threading.Barrier(8)

    def begin(turn: int) -> None:
        try:
            with psycopg.connect(database, autocommit=True) as conn:
                ready.wait(20)
                order = declared[turn:] + declared[:turn]
                run(conn, declare(order, LimitLocation("test", "postgres")))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=[turn]) for turn in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert {item.name: item.concurrency for item in bus.limits()} == {f"l{n}": n + 1 for n in range(8)}


# --- while work runs -------------------------------------------------------------------------------------------


@sync_only
def test_more_permits_wake_those_who_wait_within_a_second(
    orders: Bus, db: Db, start: Start, handlers: HandlerRegistry, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commandbus.limits.client.SWEEP_SECONDS", 1e9)  # they are told; nobody finds it by looking
    orders.declare_limit(Limit("docai", concurrency=1))
    for _ in range(3):
        start(handlers, concurrency=8)
    orders.send_many("orders", [NewCommand("page", n) for n in range(12)])
    until(lambda: calls.now == 1 and orders.status("orders")[0].parked == 11)
    orders.set_limit("docai", concurrency=7)
    until(lambda: calls.now == 7, 5)
    assert calls.most == 7
    orders.unset_limit("docai")
    assert calls.now == 7  # nobody is thrown out
    calls.go.set()
    until(lambda: orders.status("orders")[0].parked == 0 and calls.total == 12, 30)


@sync_only
def test_a_deployment_that_declares_more_wakes_those_who_wait(
    orders: Bus, db: Db, start: Start, handlers: HandlerRegistry, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commandbus.limits.client.SWEEP_SECONDS", 1e9)
    orders.declare_limit(Limit("docai", concurrency=1))
    start(handlers, concurrency=8)
    orders.send_many("orders", [NewCommand("page", n) for n in range(6)])
    until(lambda: calls.now == 1 and orders.status("orders")[0].parked == 5)
    orders.declare_limit(Limit("docai", concurrency=4))
    until(lambda: calls.now == 4, 5)
    assert (calls.most, calls.total) == (4, 4)


@sync_only
def test_fewer_permits_let_nobody_in_until_enough_have_left(
    orders: Bus, db: Db, start: Start, calls: Calls
) -> None:
    handlers = HandlerRegistry()
    lock = threading.Lock()
    seen: list[int] = []
    now = 0
    is_cut = threading.Event()

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=6)])
    def page(command: Any, ctx: Any) -> None:
        nonlocal now
        with lock:
            now += 1
            if is_cut.is_set():
                seen.append(now)
        ctx.sleep(0.02)
        calls.go.wait(60)
        with lock:
            now -= 1

    start(handlers, concurrency=10)
    orders.send_many("orders", [NewCommand("page", n) for n in range(60)])
    until(lambda: now == 6)
    orders.set_limit("docai", concurrency=2)
    is_cut.set()
    calls.go.set()
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 60, 30)
    assert seen
    assert max(seen) <= 2, seen


@sync_only
def test_a_rate_that_is_set_is_kept_from_then_on(orders: Bus, db: Db, start: Start, calls: Calls) -> None:
    orders.declare_limit(Limit("docai", concurrency=50))
    handlers = HandlerRegistry()

    @handlers.handler("orders", "page", limits=["docai"])
    def page(command: Any, ctx: Any) -> None:
        calls.total += 1

    start(handlers, concurrency=1)
    orders.set_limit("docai", rate="2/h", burst=3)
    orders.send_many("orders", [NewCommand("page", n) for n in range(10)])
    until(lambda: orders.status("orders")[0].parked == 7)
    assert calls.total == 3
    orders.set_limit("docai", rate="1000/s", burst=100)
    until(lambda: calls.total == 10, 5)


# --- how long one would wait -----------------------------------------------------------------------------------


def measured(db: Db, per_second: float) -> None:
    """So many permits were given a second, for the last ten minutes, says the row."""
    db.execute(
        "UPDATE commandbus.limits SET flow = %s, flow_at = extract(epoch FROM clock_timestamp()), "
        "flow_since = extract(epoch FROM clock_timestamp()) - 600",
        [per_second * 60],
    )


def test_nobody_waits_at_a_free_limit(bus: Bus) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    found = bus.estimate("docai")
    assert (found.seconds, found.backoff_seconds, found.ahead) == (0.0, 0.0, 0)
    assert found.text == "a permit is free"


def test_an_estimate_of_an_unknown_limit_or_command_says_so(orders: Bus) -> None:
    with pytest.raises(UnknownLimitError, match="docai"):
        orders.estimate("docai")
    orders.declare_limit(Limit("docai", concurrency=5))
    with pytest.raises(CommandNotFoundError, match="nobody"):
        orders.estimate("docai", domain="orders", command_id="nobody")
    sent = orders.send("orders", "page")
    with pytest.raises(CommandNotFoundError, match="does not wait"):
        orders.estimate("docai", domain="orders", command_id=sent.command_id)


def test_ac5_the_estimate_is_the_permits_ahead_by_the_measured_rate(
    orders: Bus, db: Db, start: Start, handlers: HandlerRegistry, calls: Calls
) -> None:
    orders.declare_limit(Limit("docai", concurrency=2))
    start(handlers, concurrency=8)
    sent = []
    for n in range(6):
        sent.append(orders.send("orders", "page", n))
        until(lambda n=n: calls.now + orders.status("orders")[0].parked == n + 1)
    until(lambda: orders.status("orders")[0].parked == 4)
    measured(db, 2)
    found = orders.estimate("docai")
    assert (found.ahead, found.backoff_seconds) == (4, 0.0)
    assert found.per_second == pytest.approx(2, rel=0.1)
    assert found.seconds == pytest.approx(2.5, rel=0.15)
    assert "4 ahead" in found.text
    waits = [orders.estimate("docai", domain="orders", command_id=item.command_id) for item in sent[2:]]
    assert [item.ahead for item in waits] == [0, 1, 2, 3]
    assert [item.seconds for item in waits] == pytest.approx([0.5, 1.0, 1.5, 2.0], rel=0.15)
    db.execute("UPDATE commandbus.limits SET flow_at = flow_at - 3600")
    found = orders.estimate("docai")
    assert (found.seconds, found.text) == (None, "4 ahead at docai; no rate was measured lately")


@sync_only
def test_ac5_the_estimate_counts_what_is_left_of_the_back_off(
    orders: Bus, db: Db, start: Start, calls: Calls
) -> None:
    orders.declare_limit(Limit("docai", concurrency=2))
    handlers = HandlerRegistry()

    @handlers.handler("orders", "page", limits=["docai"])
    def page(command: Any, ctx: Any) -> None:
        raise RateLimitError("429 from docai", retry_after=60)

    start(handlers, concurrency=1)
    sent = orders.send("orders", "page")
    until(lambda: orders.status("orders")[0].parked == 1)
    measured(db, 1)
    found = orders.estimate("docai")
    assert 50 < found.backoff_seconds <= 60
    assert found.seconds == pytest.approx(found.backoff_seconds + 2, abs=0.5)  # one ahead, one a second
    assert found.text == "429 from docai, step 1 of the back-off"
    own = orders.estimate("docai", domain="orders", command_id=sent.command_id)
    assert own.ahead == 0
    assert own.seconds == pytest.approx(own.backoff_seconds + 1, abs=0.5)
    assert orders.get_command("orders", sent.command_id).status is CommandStatus.PENDING
    db.execute("UPDATE commandbus.limits SET flow_at = flow_at - 40, flow_since = flow_since - 40")
    later = orders.estimate("docai")
    assert later.per_second == pytest.approx(1, rel=0.05), "nobody could get a permit meanwhile"
    db.execute("UPDATE commandbus.limits SET until = clock_timestamp()")
    assert orders.estimate("docai").per_second == pytest.approx(0.51, rel=0.1)


def test_ac5_the_state_of_a_back_off_can_be_seen_by_all(orders: Bus, db: Db, start: Start) -> None:
    """ "parked until 12:03:07 (in about 14 s): 429 from docai, step 1 of the back-off"."""
    orders.declare_limit(Limit("docai", concurrency=2))
    handlers = HandlerRegistry()

    @handlers.handler("orders", "page", limits=["docai"])
    def page(command: Any, ctx: Any) -> None:
        raise RateLimitError("429 from docai", retry_after=60)

    start(handlers, concurrency=1)
    sent = orders.send("orders", "page")
    until(lambda: orders.status("orders")[0].parked == 1)
    found = orders.get_limit("docai")
    assert (found.state, found.backoff_step, found.rate_limited) == ("BACKING_OFF", 1, 1)
    assert found.until is not None
    assert found.text.startswith(f"until {found.until:%H:%M:%S} (in about ")
    assert found.text.endswith("429 from docai, step 1 of the back-off")
    note = one(db, "SELECT note FROM commandbus.parked WHERE command = (SELECT id FROM commandbus.command)")
    assert note == "429 from docai, step 1 of the back-off"
    shown = orders.get_command("orders", sent.command_id)
    assert "429 from docai, step 1 of the back-off" in str(shown)


def test_settings_declare_limits_too(connect: Callable[..., Bus], database: str) -> None:
    settings = Settings(database_url=database, limits=[Limit("docai", concurrency=3)])
    bus = connect(None, settings=settings)
    if bus.driver == "sync":
        with bus.bus.limit("docai"):
            assert bus.get_limit("docai").in_use == 1
    else:

        async def main() -> None:
            async with bus.bus.limit("docai"):
                assert (await bus.bus._target.get_limit("docai")).in_use == 1

        bus.runner.run(main())
    assert bus.get_limit("docai").concurrency == 3
