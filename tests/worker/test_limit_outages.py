"""Limits whose API is down, or whose commands are bad: probes rotate, `tries` ends, nobody pays for all, and
nothing waits for ever."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest

from commandbus import (
    ApiTimeoutError,
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    Limit,
    NewCommand,
    RateLimitError,
    RetryPolicy,
)
from support.waiting import one, statuses, until, within
from support.workers import add, either

pytestmark = pytest.mark.waits
Db = psycopg.Connection[Any]
Start = Callable[..., Any]
PATIENT = RetryPolicy(max_attempts=1000, backoff_schedule=[0.01], jitter=0)
BRIEF = RetryPolicy(max_attempts=3, backoff_schedule=[0.01], jitter=0)
PROBES_OF_AN_HOUR = 60
"""With the usual settings (breaker_reset of 60 s) an hour has so many probes."""


def fail(kind: str) -> None:
    """As an API fails."""
    if kind == "429":
        raise RateLimitError("429 from docai")
    if kind == "timeout":
        raise ApiTimeoutError
    raise ConnectionError("503 from docai")


class Api:
    """What commands call: it counts the calls by command, and is down while it is told to be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.down: str | None = None
        self.bad: dict[str, str] = {}  # commands that it never likes, and what they are told

    def __call__(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1
        kind = self.bad.get(name) or self.down
        if kind is not None:
            fail(kind)

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self.calls.values())


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def start_worker(start_worker: Start) -> Start:
    """Workers whose breakers are on."""
    return partial(start_worker, breakers_enabled=True)


def listen(handlers: HandlerRegistry, api: Api, limit: Limit, **options: Any) -> None:
    """A handler that calls the API, under a limit."""

    def page(command: Any, ctx: Any) -> None:
        api(command.command_id)

    handlers.register("orders", "page", page, limits=[limit], **options)


def limit_state(db: Db, column: str) -> Any:
    return one(db, f"SELECT {column} FROM commandbus.limits WHERE name = 'docai'")


# --- probes rotate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["503", "timeout", "429"])
def test_one_bad_command_does_not_stay_the_probe(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api, kind: str
) -> None:
    """It comes first in line, because it was sent first. Its vain probes count, over its retries, too."""
    docai = Limit("docai", concurrency=9, lease=1, backoff=[0.2], breaker_reset=0.3, tries=100)
    listen(handlers, api, docai, retry_policy=PATIENT)
    api.bad["bad"] = kind
    bus.send("orders", "page", command_id="bad")
    start_worker(handlers)
    until(lambda: limit_state(db, "breaker_open"))  # alone in line, it has opened the breaker
    bus.send_many("orders", [NewCommand("page", command_id=f"good-{n}") for n in range(20)])
    until(lambda: statuses(db).get("COMPLETED") == 20, what=lambda: (api.calls, statuses(db)))


def test_every_waiting_command_probes_before_one_probes_twice(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api
) -> None:
    docai = Limit("docai", concurrency=5, breaker_failures=1, breaker_reset=0.1)
    listen(handlers, api, docai, retry_policy=PATIENT)
    api.down = "503"
    bus.send_many("orders", [NewCommand("page", command_id=f"c{n}") for n in range(8)])
    start_worker(handlers, concurrency=1)
    until(lambda: api.total >= 24, seconds=30)
    vain = limit_state(db, "vain")
    assert len(vain) == 8
    assert max(vain.values()) - min(vain.values()) <= 1, vain
    api.down = None
    until(lambda: statuses(db) == {"COMPLETED": 8})
    assert limit_state(db, "vain") == {}


def test_a_probe_of_which_nothing_is_heard_was_in_vain(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api
) -> None:
    """As one that kills its worker, again and again."""
    listen(handlers, api, Limit("docai", concurrency=5, backoff=[0.2]), retry_policy=PATIENT)
    bus.send_many("orders", [NewCommand("page", command_id=name) for name in ("first", "second")])
    bus.declare_limit(Limit("docai", concurrency=5, backoff=[0.2]))
    first = one(db, "SELECT id FROM commandbus.command WHERE command_id = 'first'")
    db.execute(
        "UPDATE commandbus.limits SET step = 1, until = now() + interval '4 seconds', probe = %s, "
        "probe_until = now()",
        [f"w/orders/first/1#{first}"],
    )
    start_worker(handlers)
    until(lambda: bus.status("orders")[0].parked == 2)
    until(lambda: statuses(db) == {"COMPLETED": 2})
    assert list(api.calls) == ["second", "first"]


# --- what opens the breaker ------------------------------------------------------------------------------------


def test_one_bad_command_among_others_does_not_open_the_breaker(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    api: Api,
    go_on: threading.Event,
) -> None:
    api.bad["bad"] = "503"

    @handlers.handler("orders", "slow", limits=[Limit("docai", concurrency=3)])
    def slow(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    listen(handlers, api, Limit("docai", concurrency=3), retry_policy=RetryPolicy(6, backoff_schedule=[0]))
    bus.send("orders", "slow")
    start_worker(handlers)
    until(lambda: bus.status("orders")[0].running == 1)
    bus.send("orders", "page", command_id="bad")
    until(lambda: statuses(db).get("IN_TROUBLESHOOTING_QUEUE") == 1)
    assert api.calls["bad"] == 6
    assert (limit_state(db, "failures"), limit_state(db, "breaker_open")) == (6, False)


def test_different_commands_open_the_breaker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api
) -> None:
    listen(handlers, api, Limit("docai", concurrency=3, breaker_reset=60), retry_policy=PATIENT)
    api.down = "503"
    bus.send_many("orders", [NewCommand("page", command_id=f"c{n}") for n in range(5)])
    start_worker(handlers, concurrency=1)
    until(lambda: limit_state(db, "breaker_open"))
    assert len(limit_state(db, "blamed")) >= 3


def test_two_that_call_are_enough_if_there_are_no_more(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api
) -> None:
    listen(handlers, api, Limit("docai", concurrency=3, breaker_reset=60), retry_policy=PATIENT)
    api.down = "503"
    bus.send_many("orders", [NewCommand("page", command_id=f"c{n}") for n in range(2)])
    start_worker(handlers, concurrency=2)
    until(lambda: limit_state(db, "breaker_open"))


# --- tries end, and nobody pays for all ------------------------------------------------------------------------


def test_tries_end_for_an_api_that_always_refuses(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api
) -> None:
    """Every 429 counts, also those of the probe."""
    listen(handlers, api, Limit("docai", concurrency=1, tries=4, backoff=[0.05], breaker_reset=0.1))
    api.down = "429"
    sent = bus.send("orders", "page", command_id="c")
    start_worker(handlers)
    status = CommandStatus.IN_TROUBLESHOOTING_QUEUE
    until(lambda: bus.get_command("orders", sent.command_id).status is status)
    assert api.calls["c"] == 4
    row = db.execute("SELECT error_code, error FROM commandbus.tsq").fetchone()
    assert row is not None
    assert row[0] == "RATE_LIMITED"
    assert "refused 4 times, and tries of limit docai is 4" in row[1]


@pytest.mark.parametrize("kind", ["503", "429", "timeout"])
def test_an_outage_of_an_hour_leaves_none_of_forty_in_the_troubleshooting_queue(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api, kind: str
) -> None:
    """An hour is as many probes as an hour has; here they follow each other six hundred times as fast."""
    docai = Limit("docai", concurrency=5, lease=1, backoff=[0.05], breaker_reset=0.1, tries=4)
    listen(handlers, api, docai, retry_policy=BRIEF)
    api.down = kind
    bus.send_many("orders", [NewCommand("page", command_id=f"c{n}") for n in range(40)])
    start_worker(handlers, concurrency=5)
    until(lambda: limit_state(db, "breaker_open"))
    began = api.total
    until(lambda: api.total >= began + PROBES_OF_AN_HOUR, seconds=40, what=lambda: api.total)
    assert one(db, "SELECT count(*) FROM commandbus.tsq") == 0
    api.down = None
    until(lambda: statuses(db) == {"COMPLETED": 40}, seconds=30, what=lambda: statuses(db))
    if kind != "429":
        assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE error_code = 'LIMIT_PROBE'") >= 50


def test_alone_in_line_a_probe_is_charged(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api
) -> None:
    policy = RetryPolicy(6, backoff_schedule=[0])
    listen(handlers, api, Limit("docai", concurrency=1, breaker_reset=0.1), retry_policy=policy)
    api.down = "503"
    bus.send("orders", "page", command_id="c")
    start_worker(handlers)
    until(lambda: statuses(db) == {"IN_TROUBLESHOOTING_QUEUE": 1})
    assert api.calls["c"] == 6


def test_a_probe_is_charged_when_another_call_has_succeeded_since_the_breaker_opened(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    api: Api,
    go_on: threading.Event,
) -> None:
    """Then the API works, and the command is to blame. That call was under way when the breaker opened."""
    api.bad["bad"] = "503"
    docai = Limit("docai", concurrency=2, breaker_failures=1, breaker_reset=0.3)

    @handlers.handler("orders", "slow", limits=[docai])
    def slow(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    probing = threading.Event()
    succeeded = threading.Event()

    @handlers.handler("orders", "page", limits=[docai], retry_policy=RetryPolicy(2, backoff_schedule=[0]))
    def page(command: Any, ctx: Any) -> None:
        if api.calls[command.command_id] == 1:
            probing.set()
            succeeded.wait(30)
        api(command.command_id)

    bus.send("orders", "slow")
    start_worker(handlers)
    until(lambda: bus.status("orders")[0].running == 1)
    bus.send("orders", "page", command_id="bad")
    assert probing.wait(60)
    bus.send("orders", "page", command_id="other")
    until(lambda: bus.status("orders")[0].parked == 1)
    go_on.set()
    until(lambda: limit_state(db, "good_at > opened_at"))
    succeeded.set()
    until(lambda: statuses(db).get("IN_TROUBLESHOOTING_QUEUE") == 1)
    assert api.calls["bad"] == 2


@pytest.mark.parametrize("store", ["postgres", "redis"])
@pytest.mark.parametrize("others", [3, 0], ids=["in line", "alone"])
def test_a_hung_probe_of_a_limited_command_is_waived_while_others_wait(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    redis_url: str,
    go_on: threading.Event,
    store: str,
    others: int,
) -> None:
    """The breaker is open. The first probe hangs until it is given up as stuck. Alone in line it is charged."""
    docai = Limit("docai", concurrency=2, lease=2, breaker_reset=0.3, store=store)
    began: list[str] = []

    @handlers.handler("orders", "page", limits=[docai], timeout=1, retry_policy=RetryPolicy(1))
    def page(command: Any, ctx: Any) -> None:
        began.append(command.command_id)
        if began == ["hangs"]:
            go_on.wait(30)

    names = ["hangs", *(f"waits{n}" for n in range(others))]
    bus.send_many("orders", [NewCommand("page", command_id=name) for name in names])
    bus.pause("orders", "page", operator="ann")
    start_worker(handlers, cancel_grace=0.3, redis_url=redis_url)
    until(lambda: bus.status("orders")[0].parked == len(names))
    db.execute(
        "UPDATE commandbus.limits SET breaker_open = true, opened_at = now(), open_until = now() + '1 second'"
    )
    bus.resume("orders", "page", operator="ann")
    if not others:
        until(lambda: statuses(db) == {"IN_TROUBLESHOOTING_QUEUE": 1})
        assert began == ["hangs"]
        return
    until(lambda: statuses(db) == {"COMPLETED": len(names)}, what=lambda: (began, statuses(db)))
    assert limit_state(db, "store") == store
    assert began[0] == "hangs"
    assert began[1] != "hangs", "another one is the next probe"
    assert sorted(began) == sorted([*names, "hangs"])
    (stuck,) = [
        item for item in bus.get_attempts("orders", "hangs") if item.verdict not in ("PARKED", "GIVEN_BACK")
    ]
    assert stuck.error_code == "EXECUTION_STUCK"
    assert "not charged: it was the probe of limit docai" in (stuck.error or "")


def test_a_hung_probe_is_waived_in_a_block_too(
    bus: CommandBus,
    db: Db,
    database: str,
    handlers: HandlerRegistry,
    start_worker: Start,
    go_on: threading.Event,
) -> None:
    """Given up as stuck while a program waits: that one is the next probe, and the attempt is not charged.

    The hung call may still be under way, so its permit is taken until its lease ends.
    """
    began: list[str] = []

    @handlers.handler("orders", "page", timeout=60, retry_policy=RetryPolicy(1))
    def page(command: Any, ctx: Any) -> None:
        with ctx.limit("docai", wait=30, timeout=5):
            began.append("page")
            if began == ["page"]:
                go_on.wait(30)

    def call() -> None:
        with CommandBus(database) as program, program.limit("docai", wait=60):
            began.append("program")

    bus.declare_limit(Limit("docai", concurrency=5, lease=3, backoff=[0.1], breaker_failures=0))
    db.execute("UPDATE commandbus.limits SET step = 1, until = now()")
    sent = bus.send("orders", "page", max_attempts=1)
    start_worker(handlers, cancel_grace=0.3)
    until(lambda: began == ["page"])
    program = threading.Thread(target=call, daemon=True)
    program.start()
    until(lambda: bus.get_limit("docai").callers == 1)
    until(lambda: bus.get_command("orders", sent.command_id).status is CommandStatus.COMPLETED, seconds=30)
    program.join(20)
    assert began == ["page", "program", "page"]
    (stuck,) = bus.get_attempts("orders", sent.command_id)
    assert (stuck.number, stuck.error_code) == (1, "EXECUTION_STUCK")
    assert "not charged: it was the probe of limit docai" in (stuck.error or "")
    assert one(db, "SELECT attempt - waived FROM commandbus.command") == 1


def test_a_failure_in_a_block_is_waived_for_the_probe_and_parked(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: Api, lane: str
) -> None:
    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai", wait=20)):
            api(command.command_id)

    add(handlers, lane, "page", page, retry_policy=BRIEF, timeout=60)
    bus.declare_limit(Limit("docai", concurrency=5, breaker_failures=1, breaker_reset=0.1))
    api.down = "503"
    bus.send_many("orders", [NewCommand("page", command_id=f"c{n}") for n in range(6)])
    start_worker(handlers, concurrency=3)
    until(lambda: api.total >= 30, seconds=30)
    assert one(db, "SELECT count(*) FROM commandbus.tsq") == 0
    api.down = None
    until(lambda: statuses(db) == {"COMPLETED": 6}, seconds=20)


# --- nothing waits for ever, and a line that moves never expires -------------------------------------------------


def test_a_line_that_moves_never_expires(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start
) -> None:
    """The last one waits far longer than max_wait, and a call succeeds again and again."""

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1, max_wait=1.5)])
    def page(command: Any, ctx: Any) -> None:
        time.sleep(0.25)

    bus.send_many("orders", [NewCommand("page", n) for n in range(24)])
    start_worker(handlers, concurrency=2)
    until(lambda: statuses(db) == {"COMPLETED": 24}, seconds=40, what=lambda: statuses(db))


def test_nobody_is_given_up_for_the_time_without_workers(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, go_on: threading.Event
) -> None:
    """All workers were stopped over a long weekend: what waits goes on where it was."""
    listen(handlers, Api(), Limit("docai", concurrency=1))

    @handlers.handler("orders", "slow", limits=["docai"])
    def slow(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    bus.send_many("orders", [NewCommand("slow"), *(NewCommand("page", command_id=f"c{n}") for n in range(3))])
    worker = start_worker(handlers)
    until(lambda: bus.status("orders")[0].parked == 3 and limit_state(db, "tended_at IS NOT NULL"))
    go_on.set()
    worker.stop()
    db.execute(
        "UPDATE commandbus.parked SET first_parked_at = now() - interval '3 days', woken_at = NULL, token = NULL"
    )
    db.execute("UPDATE commandbus.attempt SET finished_at = now() - interval '3 days'")
    db.execute(
        "UPDATE commandbus.limits SET holders = '{}', good_at = now() - interval '3 days', "
        "tended_at = now() - interval '3 days', tended_since = now() - interval '3 days'"
    )
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '10 years', headers = NULL")
    start_worker(handlers)
    until(lambda: statuses(db).get("PENDING", 0) == 0)
    assert "IN_TROUBLESHOOTING_QUEUE" not in statuses(db)


def test_a_line_that_stands_still_for_a_day_needs_a_person(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, go_on: threading.Event
) -> None:
    """Nobody has said anything of max_wait."""

    @handlers.handler("orders", "slow", limits=[Limit("docai", concurrency=1)])
    def slow(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    bus.send_many("orders", [NewCommand("slow", command_id=name) for name in ("holds", "waits")])
    start_worker(handlers)
    until(lambda: bus.status("orders")[0].parked == 1 and limit_state(db, "tended_at IS NOT NULL"))
    day = "interval '25 hours'"
    db.execute(f"UPDATE commandbus.attempt SET finished_at = finished_at - {day}")
    db.execute(f"UPDATE commandbus.parked SET first_parked_at = first_parked_at - {day}")
    db.execute(f"UPDATE commandbus.limits SET tended_since = tended_since - {day}")
    until(lambda: statuses(db).get("IN_TROUBLESHOOTING_QUEUE") == 1)
    row = db.execute("SELECT error_code, error FROM commandbus.tsq").fetchone()
    assert row is not None
    assert row[0] == "LIMIT_WAIT"
    assert "without a successful call of anybody, and max_wait is 1d" in row[1]


# --- a limit that is removed between a refusal and the parking ---------------------------------------------------


def test_a_command_whose_limit_is_gone_goes_on_if_its_handler_needs_it_no_more(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, go_on: threading.Event
) -> None:
    """The new code knows of no limit at all, and a command of the old one waits."""
    old = HandlerRegistry()
    old.register("orders", "page", lambda ctx: go_on.wait(30), limits=[Limit("docai", concurrency=1)])
    bus.send_many("orders", [NewCommand("page", command_id=name) for name in ("holds", "waits")])
    worker = start_worker(old)
    until(lambda: bus.status("orders")[0].parked == 1)
    worker.drain("the test says so")
    go_on.set()
    worker.stop()
    db.execute("UPDATE commandbus.parked SET woken_at = NULL, token = NULL")
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '10 years', headers = NULL")
    db.execute("DELETE FROM commandbus.limits")
    handlers.register("orders", "page", lambda ctx: None)
    start_worker(handlers)
    within(10, lambda: statuses(db) == {"COMPLETED": 2})


def test_a_command_that_is_parked_for_a_limit_that_is_gone_is_handed_to_a_person(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, go_on: threading.Event
) -> None:
    @handlers.handler("orders", "slow", limits=["docai"])
    def slow(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    bus.set_limit("docai", concurrency=1)
    start_worker(handlers)
    bus.send_many("orders", [NewCommand("slow", command_id=name) for name in ("holds", "waits")])
    until(lambda: bus.status("orders")[0].parked == 1)
    # As if `unset_limit` had come a moment before: it refuses while somebody waits.
    db.execute("DELETE FROM commandbus.limits")
    within(10, lambda: statuses(db).get("IN_TROUBLESHOOTING_QUEUE") == 1)
    row = db.execute("SELECT command_id, error_code FROM commandbus.tsq JOIN commandbus.command ON id = command")
    assert row.fetchone() == ("waits", "LIMIT_UNKNOWN")
