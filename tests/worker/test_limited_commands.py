"""Handlers with `limits=[…]`: permits, parking, turns, back-off, caps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    CommandBusError,
    CommandStatus,
    Limit,
    LimitTimeoutError,
    RateLimitError,
    TroubleshootingQueue,
    Worker,
)
from commandbus.limits.client import LimitClient
from commandbus.limits.make_client import make_limit_client
from commandbus.model.command import NewCommand
from support.waiting import statuses, until
from support.workers import quick_settings

Start = Callable[..., Any]


class Inside:
    """Counts who is inside at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = 0
        self.most = 0
        self.order: list[Any] = []

    def __call__(self, data: Any, seconds: float = 0.0) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(data)
        time.sleep(seconds)
        with self._lock:
            self.now -= 1


def completed(db: psycopg.Connection[Any]) -> int:
    row = db.execute("SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'").fetchone()
    return 0 if row is None else int(row[0])


def holders(db: psycopg.Connection[Any], name: str = "docai") -> dict[str, float]:
    row = db.execute("SELECT holders FROM commandbus.limits WHERE name = %s", [name]).fetchone()
    return {} if row is None else row[0]


def test_no_more_than_the_limit_run_at_once_and_all_run_in_their_order(bus, db, handlers, start_worker):
    inside = Inside()

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=3)])
    def page(command: Any, ctx: Any) -> None:
        inside(command.data, 0.01)

    bus.send_many("orders", [NewCommand("page", n) for n in range(60)])
    start_worker(handlers, concurrency=8)
    until(lambda: completed(db) == 60, seconds=30)
    assert inside.most <= 3
    # Three at a time: nobody is overtaken by more than those who run beside him.
    assert all(abs(permit - n) <= 8 for permit, n in enumerate(inside.order)), inside.order
    until(lambda: holders(db) == {})
    assert db.execute("SELECT count(*) FROM commandbus.command WHERE attempt > waived + 1").fetchone() == (0,)


def test_other_work_goes_on_while_the_limit_is_full(bus, db, handlers, start_worker, go_on):
    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    @handlers.handler("orders", "other")
    def other(command: Any, ctx: Any) -> None:
        return None

    bus.send_many("orders", [NewCommand("page", n) for n in range(20)])
    start_worker(handlers, concurrency=2)
    until(lambda: bus.status("orders")[0].parked == 19)
    bus.send_many("orders", [NewCommand("other", n) for n in range(50)])
    until(lambda: completed(db) == 50)
    assert bus.status("orders")[0].running == 1
    go_on.set()
    until(lambda: completed(db) == 70, seconds=30)


def test_a_parked_command_spends_no_attempt(bus, db, handlers, start_worker, go_on):
    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> str:
        go_on.wait(30)
        return f"attempt {ctx.attempt} of {ctx.max_attempts}, number {ctx.attempt_number}"

    sent = [bus.send("orders", "page", n, max_attempts=1) for n in range(3)]
    start_worker(handlers, concurrency=4)
    until(lambda: bus.status("orders")[0].parked == 2)
    go_on.set()
    until(lambda: completed(db) == 3)
    found = [bus.get_command("orders", item.command_id) for item in sent]
    assert {record.status for record in found} == {CommandStatus.COMPLETED}
    assert sorted(record.result for record in found) == [
        "attempt 1 of 1, number 1",
        "attempt 1 of 1, number 2",
        "attempt 1 of 1, number 2",
    ]
    assert {record.charged_attempts for record in found} == {1}


def test_the_rate_is_kept(bus, db, handlers, start_worker):
    times: list[float] = []

    @handlers.handler("orders", "page", limits=[Limit("docai", rate="20/s", burst=2)])
    def page(command: Any, ctx: Any) -> None:
        times.append(time.monotonic())

    bus.send_many("orders", [NewCommand("page", n) for n in range(22)])
    start_worker(handlers, concurrency=8)
    until(lambda: completed(db) == 22, seconds=30)
    # 22 calls at 20 a second, 2 of them at once: a second at the least.
    assert times[-1] - times[0] >= 0.9


def test_two_limits_are_needed_both(bus, db, handlers, start_worker):
    both, one = Inside(), Inside()

    @handlers.handler("orders", "both", limits=[Limit("docai", concurrency=4), Limit("gpu", concurrency=2)])
    def run_both(command: Any, ctx: Any) -> None:
        both(command.data, 0.01)

    @handlers.handler("orders", "one", limits=["docai"])
    def run_one(command: Any, ctx: Any) -> None:
        one(command.data, 0.01)

    bus.send_many("orders", [NewCommand("both" if n % 2 else "one", n) for n in range(40)])
    start_worker(handlers, concurrency=8)
    until(lambda: completed(db) == 40, seconds=30)
    assert both.most <= 2
    until(lambda: holders(db) == {} and holders(db, "gpu") == {})


def test_a_429_is_state_of_the_limit_and_spends_no_attempt(bus, db, handlers, start_worker):
    calls: list[tuple[float, int]] = []
    lock = threading.Lock()

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=5, backoff=[0.5])])
    def page(command: Any, ctx: Any) -> None:
        with lock:
            calls.append((time.monotonic(), command.data))
            first = len(calls) == 1
        if first:
            raise RateLimitError("429 from docai")

    bus.send_many("orders", [NewCommand("page", n, max_attempts=1) for n in range(6)])
    start_worker(handlers, concurrency=1)
    until(lambda: completed(db) == 6, seconds=30)
    # Nobody called during the back-off of half a second (less a tenth of jitter).
    assert calls[1][0] - calls[0][0] >= 0.4
    limit_state = db.execute("SELECT step, failures, breaker_open, rate_limited FROM commandbus.limits").fetchone()
    assert limit_state == (0, 0, False, 1)
    codes = db.execute("SELECT DISTINCT error_code FROM commandbus.attempt ORDER BY 1").fetchall()
    assert ("RATE_LIMITED",) in codes


@pytest.mark.parametrize("limits", [[Limit("docai", concurrency=5)], []], ids=["held", "only named"])
def test_a_429_is_one_request_to_the_limit_client(bus, db, handlers, start_worker, monkeypatch, limits):
    """The permit, what the API said, and the question what becomes of the command go together."""
    asked: list[str] = []
    judge, leave = LimitClient.judge, LimitClient.release
    monkeypatch.setattr(LimitClient, "judge", lambda *args: (asked.append("judge"), judge(*args)))
    monkeypatch.setattr(LimitClient, "release", lambda *args: (asked.append("leave"), leave(*args)))
    bus.declare_limit(Limit("docai", concurrency=5, backoff=[60.0]))

    @handlers.handler("orders", "page", limits=limits)
    def page(command: Any, ctx: Any) -> None:
        raise RateLimitError("429 from docai", limit="docai")

    bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: bus.status("orders")[0].parked == 1)
    assert asked == ["judge"]
    assert holders(db) == {}
    assert bus.get_limit("docai").rate_limited == 1


def test_an_attempt_that_has_nothing_to_do_with_limits_knows_nothing_of_them(bus, db, handlers, start_worker):
    seen: list[Any] = []

    @handlers.handler("orders", "plain")
    def plain(command: Any, ctx: Any) -> None:
        seen.append(ctx._attempt.limit_use)

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> None:
        seen.append(ctx._attempt.limit_use.permits[0].limit)

    bus.send("orders", "plain")
    bus.send("orders", "page")
    start_worker(handlers, concurrency=1)
    until(lambda: completed(db) == 2)
    assert sorted(seen, key=str) == [None, "docai"]


def test_retry_after_wins_over_the_schedule(bus, db, handlers, start_worker):
    calls: list[float] = []

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=5, backoff=[30])])
    def page(command: Any, ctx: Any) -> None:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise RateLimitError(retry_after=0.3)

    bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: completed(db) == 1)
    assert calls[1] - calls[0] >= 0.3


def test_after_a_back_off_one_probe_goes_first(bus, db, handlers, start_worker, go_on):
    started: list[int] = []
    probing = threading.Event()

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=5, backoff=[0.2])])
    def page(command: Any, ctx: Any) -> None:
        started.append(command.data)
        if len(started) == 1:
            raise RateLimitError
        if len(started) == 2:
            probing.set()
            go_on.wait(30)

    bus.send_many("orders", [NewCommand("page", n) for n in range(5)])
    start_worker(handlers, concurrency=1)
    assert probing.wait(60)
    worker = db.execute("SELECT probe IS NOT NULL FROM commandbus.limits").fetchone()
    assert worker == (True,)
    until(lambda: bus.status("orders")[0].parked == 4)
    assert len(started) == 2
    go_on.set()
    until(lambda: completed(db) == 5, seconds=20)


def test_at_its_cap_of_tries_a_command_goes_to_the_tsq_as_rate_limited(bus, db, handlers, start_worker):
    docai = Limit("docai", concurrency=5, backoff=[0.05], tries=2, breaker_failures=0)

    @handlers.handler("orders", "page", limits=[docai])
    def page(command: Any, ctx: Any) -> None:
        if command.data == "bad":
            raise RateLimitError("429 from docai", retry_after=0.05)

    bad = bus.send("orders", "page", "bad")
    start_worker(handlers, concurrency=2)

    def ends() -> bool:
        # Good calls in between end the back-off: the bad one is not always the probe, which does not count.
        bus.send("orders", "page", "good")
        return bus.get_command("orders", bad.command_id).status is CommandStatus.IN_TROUBLESHOOTING_QUEUE

    until(ends, seconds=30)
    row = db.execute("SELECT error_code, error FROM commandbus.tsq").fetchone()
    assert row is not None
    assert row[0] == "RATE_LIMITED"
    assert "tries of limit docai is 2" in row[1]


def test_max_wait_hands_a_command_to_a_person(bus, db, handlers, start_worker, go_on):
    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1, max_wait=0.3)])
    def page(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    bus.send("orders", "page", 1)
    start_worker(handlers, concurrency=2)
    until(lambda: bus.status("orders")[0].running == 1)
    late = bus.send("orders", "page", 2)
    status = CommandStatus.IN_TROUBLESHOOTING_QUEUE
    until(lambda: bus.get_command("orders", late.command_id).status is status, seconds=20)
    row = db.execute("SELECT error_code, error FROM commandbus.tsq").fetchone()
    assert row is not None
    assert row[0] == "LIMIT_WAIT"
    assert "max_wait" in row[1]


def test_a_failed_handler_frees_its_permit(bus, db, handlers, start_worker):
    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> None:
        raise BusinessRuleException("no")

    bus.send_many("orders", [NewCommand("page", n) for n in range(5)])
    start_worker(handlers, concurrency=2)
    until(lambda: statuses(db) == {"FAILED": 5})
    until(lambda: holders(db) == {})
    assert db.execute("SELECT failures FROM commandbus.limits").fetchone() == (0,)


def test_an_unknown_limit_is_refused_at_start(bus, handlers, start_worker):
    @handlers.handler("orders", "page", limits=["docia"])
    def page(command: Any, ctx: Any) -> None:
        return None

    with pytest.raises(ValueError, match=r"unknown limit 'docia'.*commandbus limits set docia"):
        start_worker(handlers)


def test_a_parked_command_can_be_cancelled(bus, db, handlers, start_worker, go_on):
    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    bus.send("orders", "page", 1)
    start_worker(handlers, concurrency=2)
    until(lambda: bus.status("orders")[0].running == 1)
    waiting = bus.send("orders", "page", 2)
    until(lambda: bus.status("orders")[0].parked == 1)
    bus.cancel("orders", waiting.command_id, operator="ann")
    assert bus.get_command("orders", waiting.command_id).status is CommandStatus.CANCELED
    assert db.execute("SELECT count(*) FROM commandbus.parked").fetchone() == (0,)
    go_on.set()
    until(lambda: completed(db) == 1)


def test_a_worker_that_runs_until_idle_works_off_what_waits_for_a_limit(bus, db, handlers, database):
    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> None:
        return None

    bus.send_many("orders", [NewCommand("page", n) for n in range(30)])
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    assert completed(db) == 30


def test_a_limit_that_is_removed_while_work_runs_hands_its_commands_to_a_person(bus, db, handlers, start_worker):
    @handlers.handler("orders", "page", limits=["docai"])
    def page(command: Any, ctx: Any) -> None:
        return None

    bus.set_limit("docai", concurrency=1)
    start_worker(handlers)
    bus.send("orders", "page", 1)
    until(lambda: completed(db) == 1)
    assert bus.unset_limit("docai") is None
    gone = bus.send("orders", "page", 2)
    status = CommandStatus.IN_TROUBLESHOOTING_QUEUE
    until(lambda: bus.get_command("orders", gone.command_id).status is status)
    assert db.execute("SELECT error_code FROM commandbus.tsq").fetchone() == ("LIMIT_UNKNOWN",)


def test_who_is_forgotten_before_the_limit_client_has_looked_takes_no_permit(bus, db, database):
    bus.declare_limit(Limit("docai", concurrency=1))
    limit_client = make_limit_client(quick_settings(database), "test")
    calls = []
    limit_client.start()
    for _ in range(20):
        call = limit_client.acquire("docai", wait=5, holder="nobody")
        limit_client.forget(call)
        calls.append(call)
    until(lambda: all(call.answer.done() for call in calls))
    limit_client.stop(10)
    assert holders(db) == {}
    assert db.execute("SELECT count(*) FROM commandbus.parked").fetchone() == (0,)


def test_the_error_of_an_outer_block_is_timeout_after_an_inner_one(bus, db, handlers, start_worker):
    @handlers.handler("orders", "page", on_timeout="fail")
    def page(command: Any, ctx: Any) -> None:
        with ctx.limit("docai", timeout=1):
            with ctx.limit("gpu", timeout=0.5):
                pass
            ctx.sleep(20)

    bus.declare_limit(Limit("docai", concurrency=1))
    bus.declare_limit(Limit("gpu", concurrency=1))
    bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: statuses(db) == {"FAILED": 1})
    assert db.execute("SELECT error FROM commandbus.attempt").fetchone() == (
        "no answer from docai within 1 s (timeout of the block)",
    )


def test_a_caller_whose_kept_permit_is_gone_keeps_its_turn(bus, db, database):
    """Its turn came, but it was too late for the permit that was kept for it."""
    bus.declare_limit(Limit("docai", concurrency=1))
    got = threading.Event()

    def wait() -> None:
        with bus.limit("docai", wait=60):
            got.set()

    with CommandBus(database) as other:
        with other.limit("docai"):
            waiting = threading.Thread(target=wait)
            waiting.start()
            until(lambda: db.execute("SELECT count(*) FROM commandbus.parked").fetchone() == (1,))
            db.execute("UPDATE commandbus.parked SET woken_at = now()")
            until(lambda: db.execute("SELECT woken_at FROM commandbus.parked").fetchone() == (None,))
        assert got.wait(60)
        waiting.join(20)


def test_a_limit_that_is_removed_while_its_permit_is_held_ends_nothing(bus, db):
    bus.set_limit("gone", concurrency=1, lease=1)
    bus.declare_limit(Limit("docai", concurrency=1, lease=1))
    with bus.limit("gone") as gone, bus.limit("docai"):
        bus.unset_limit("gone")
        (first,) = holders(db).values()
        until(lambda: next(iter(holders(db).values())) > first + 1.5)  # renewed, and renewed again
        assert not gone.is_lost
    until(lambda: holders(db) == {})


def test_what_is_parked_when_the_last_worker_stops_goes_on_with_the_next(bus, db, handlers, start_worker, go_on):
    ran: list[int] = []

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> None:
        ran.append(command.data)
        if command.data == 0:
            go_on.wait(30)

    bus.send_many("orders", [NewCommand("page", n) for n in range(4)])
    first = start_worker(handlers)
    until(lambda: bus.status("orders")[0].parked == 3)
    first.drain("the test says so")
    go_on.set()
    first.stop()
    assert ran == [0]
    db.execute("UPDATE commandbus.parked SET woken_at = NULL, token = NULL")
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() + interval '10 years'")
    db.execute("UPDATE commandbus.limits SET holders = '{}'")
    start_worker(handlers)
    until(lambda: completed(db) == 4, seconds=30)
    assert sorted(ran) == [0, 1, 2, 3]


def test_a_program_without_redis_does_not_move_a_limit_that_is_kept_there(bus, db, database, redis_url):
    with CommandBus(settings=quick_settings(database, redis_url=redis_url)) as there:
        there.declare_limit(Limit("docai", concurrency=1))
    bus.declare_limit(Limit("docai", concurrency=2))
    assert db.execute("SELECT store, concurrency FROM commandbus.limits").fetchone() == ("redis", 2)
    with pytest.raises(CommandBusError, match="has no redis_url"), bus.limit("docai"):
        pass


def test_a_limit_that_is_in_use_does_not_move_to_redis(bus, db, database, redis_url, caplog):
    bus.declare_limit(Limit("docai", concurrency=1))
    with CommandBus(settings=quick_settings(database, redis_url=redis_url)) as there:
        with bus.limit("docai"):
            there.declare_limit(Limit("docai", concurrency=1))
            assert db.execute("SELECT store FROM commandbus.limits").fetchone() == ("postgres",)
            assert "is in use, so it stays in postgres" in caplog.text
        until(lambda: holders(db) == {})
        there.declare_limit(Limit("docai", concurrency=1))
        assert db.execute("SELECT store FROM commandbus.limits").fetchone() == ("redis",)


def test_who_declares_a_limit_otherwise_is_written_down(bus, db, caplog):
    bus.declare_limit(Limit("docai", concurrency=3))
    bus.declare_limit(Limit("docai", concurrency=9))
    assert "limit docai was declared differently before: concurrency was 3, is 9" in caplog.text
    actions = db.execute("SELECT subject, action, details FROM commandbus.control_action").fetchall()
    assert actions == [("limit docai", "DECLARE", {"concurrency": 9})]


def test_a_longest_wait_that_is_set_counts_for_those_who_wait_already(bus, db, handlers, start_worker, go_on):
    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=1)])
    def page(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    bus.send_many("orders", [NewCommand("page", command_id=name) for name in ("first", "second")])
    start_worker(handlers, concurrency=2)
    until(lambda: bus.status("orders")[0].parked == 1)
    bus.set_limit("docai", max_wait=0.2)
    until(lambda: statuses(db).get("IN_TROUBLESHOOTING_QUEUE") == 1)
    go_on.set()
    until(lambda: completed(db) == 1)
    (waited,) = TroubleshootingQueue(bus).list("orders")
    assert (waited.command_id, waited.error_code) == ("second", "LIMIT_WAIT")


def test_who_waits_in_vain_is_told_what_was_in_the_way(bus):
    bus.declare_limit(Limit("docai", concurrency=1))
    bus.open_breaker(limit="docai", operator="ann", reason="they are down")
    told = r"within 200ms: the breaker of docai is open: .*they are down"
    with pytest.raises(LimitTimeoutError, match=told), bus.limit("docai", wait=0.2):
        pass


def test_a_worker_that_cannot_reach_a_limit_says_so_once(
    bus, db, database, handlers, start_worker, redis_url, caplog
):
    """Somebody waits for a limit in Redis, and this worker has none."""
    handlers.register("orders", "other", lambda command, ctx: None)
    with CommandBus(settings=quick_settings(database, redis_url=redis_url)) as there:
        there.declare_limit(Limit("docai", concurrency=1))
    db.execute(
        "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since) "
        "VALUES ('orders', 'page', 1, 1, 'limit', 'docai', now())"
    )
    said = "cannot wake commands that wait for limit docai"
    start_worker(handlers)
    until(lambda: said in caplog.text)
    bus.set_limit("docai", concurrency=2)  # it looks again
    bus.send("orders", "other")
    until(lambda: completed(db) == 1)
    assert caplog.text.count(said) == 1
