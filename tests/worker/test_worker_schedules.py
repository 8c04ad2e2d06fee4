"""Schedules and real workers: one firing in the fleet, in time; missed firings; overlap; declarations; no cost."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, PermanentCommandError, Schedule, Worker
from commandbus.model.schedule import command_id_of
from support.waiting import one, statuses, until, until_settled, within

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
FIRINGS = """
SELECT (headers->>'scheduled_for')::timestamptz, created_at - (headers->>'scheduled_for')::timestamptz
  FROM commandbus.command WHERE headers->>'schedule' = %s AND command_id NOT LIKE '%%/%%' ORDER BY 1
"""


def noop(command: Any, ctx: Any) -> None: ...


def firings(db: Db, name: str) -> list[tuple[Any, timedelta]]:
    return db.execute(FIRINGS, (name,)).fetchall()


def is_without_gap(found: list[tuple[Any, timedelta]], step: float = 1.0) -> bool:
    instants = [instant for instant, _ in found]
    return instants == [instants[0] + timedelta(seconds=step) * n for n in range(len(instants))]


def threads_of(worker: Worker) -> list[str]:
    return [thread.name for thread in threading.enumerate() if worker.id in thread.name]


def make_due(db: Db, name: str, ago: str) -> None:
    """No worker has run for so long."""
    db.execute(
        "UPDATE commandbus.schedule SET passed_at = clock_timestamp() - %s::interval, "
        "next_at = clock_timestamp(), version = version + 1 WHERE name = %s",
        (ago, name),
    )


@pytest.mark.slow
def test_ten_workers_make_each_firing_once_and_within_a_second(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.schedule("orders", "tick", every="1s", missed="run_all")(noop)
    handlers.schedule("orders", "tock", cron="* * * * *", command_type="tick")(noop)
    for _ in range(10):
        start_worker(handlers, concurrency=1)
    until(lambda: len(firings(db, "tick")) >= 4, 30)
    until_settled(db)
    found = firings(db, "tick")
    assert is_without_gap(found)
    assert max(late for _, late in found) < timedelta(seconds=1)
    assert one(db, "SELECT fired FROM commandbus.schedule WHERE name = 'tick'") >= len(found)


def test_a_schedule_made_at_run_time_wakes_a_worker_that_had_none(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "tick", noop)
    worker = start_worker(handlers)
    until(lambda: one(db, "SELECT EXISTS (SELECT FROM commandbus.worker)"))
    assert not [name for name in threads_of(worker) if "scheduler" in name]
    bus.schedules.create("orders", "tick", every="1s")
    until(lambda: firings(db, "tick"))
    assert max(late for _, late in firings(db, "tick")) < timedelta(seconds=1)
    bus.schedules.pause("orders", "tick")
    count = len(firings(db, "tick"))
    bus.schedules.create("orders", "other", every="1s", command_type="tick")
    until(lambda: firings(db, "other"))
    assert len(firings(db, "tick")) == count
    bus.schedules.resume("orders", "tick")
    until(lambda: len(firings(db, "tick")) > count)
    worker.stop()
    until(lambda: not threads_of(worker), what=lambda: threads_of(worker))


def test_behind_a_pooler_nobody_is_notified_and_it_fires_all_the_same(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "tick", noop)
    start_worker(handlers, prepared_statements=False)
    until(lambda: one(db, "SELECT EXISTS (SELECT FROM commandbus.worker)"))
    bus.schedules.create("orders", "tick", every="1s", missed="run_all")
    until(lambda: len(firings(db, "tick")) >= 4)
    assert is_without_gap(firings(db, "tick"))
    assert firings(db, "tick")[-1][1] < timedelta(seconds=1)


def test_a_worker_without_schedules_loads_nothing_for_them() -> None:
    program = (
        "import sys, commandbus, commandbus.worker.runtime\n"
        "from commandbus import CommandBus, HandlerRegistry, Worker\n"
        "print(*(name for name in sys.modules if 'cronsim' in name or 'schedule' in name))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(said) == {
        "commandbus.flow.schedules",
        "commandbus.flow.schedules.exist",
        "commandbus.worker.execution.schedule_declarations",
        "commandbus.worker.scheduler_on_demand",
    }


@pytest.mark.parametrize(
    ("missed", "made"), [("skip", 0), ("run_once", 1), ("run_all", 5)], ids=["skip", "run_once", "run_all"]
)
def test_after_five_hours_without_a_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, missed: Any, made: int
) -> None:
    handlers.register("orders", "report", noop)
    # An hour that ended half an hour ago: neither just due nor late by less than a minute.
    minute = (one(db, "SELECT extract(minute FROM now())::integer") + 30) % 60
    bus.schedules.create("orders", "report", cron=f"{minute} * * * *", missed=missed)
    make_due(db, "report", "5 hours")
    start_worker(handlers)
    until(lambda: one(db, "SELECT next_at > clock_timestamp() FROM commandbus.schedule"))
    until_settled(db)
    assert len(firings(db, "report")) == made
    note = one(db, "SELECT note FROM commandbus.schedule")
    assert (note is None) == (missed == "run_all")


def test_overlap_skip_and_queue(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    running = {"skip": 0, "queue": 0}
    most = dict(running)
    lock = threading.Lock()

    def slow(command: Any, ctx: Any) -> None:
        name = command.headers["schedule"]
        with lock:
            running[name] += 1
            most[name] = max(most[name], running[name])
        go_on.wait(20)
        with lock:
            running[name] -= 1

    handlers.register("orders", "slow", slow)
    for name in ("skip", "queue"):
        bus.schedules.create("orders", name, every="1s", command_type="slow", overlap=name, data={"n": 1})
    start_worker(handlers)
    until(lambda: one(db, "SELECT skipped FROM commandbus.schedule WHERE name = 'skip'") >= 2)
    until(lambda: bus.schedules.get("orders", "queue").waiting_since is not None)  # type: ignore[union-attr]
    assert [len(firings(db, name)) for name in ("skip", "queue")] == [1, 1]
    go_on.set()
    until(lambda: all(len(firings(db, name)) >= 2 for name in ("skip", "queue")))
    assert most == {"skip": 1, "queue": 1}


def test_a_last_command_in_troubleshooting_counts_as_finished_and_warns(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(command: Any, ctx: Any) -> None:
        raise PermanentCommandError("NO", "never")

    handlers.register("orders", "bad", fails)
    bus.schedules.create("orders", "bad", every="1s", overlap="skip")
    start_worker(handlers)
    until(lambda: statuses(db).get("IN_TROUBLESHOOTING_QUEUE", 0) >= 2)
    until(lambda: "although the last command is in the troubleshooting queue" in caplog.text)
    assert "troubleshooting" in str(bus.schedules.get("orders", "bad"))


def test_a_paused_domain_fires_and_its_commands_wait(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.schedule("orders", "tick", every="1s", overlap="skip")(noop)
    bus.pause("orders", operator="ann")
    start_worker(handlers)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.schedule WHERE skipped >= 1") == 1)
    assert statuses(db) == {"PENDING": 1}
    bus.resume("orders", operator="ann")
    until(lambda: statuses(db).get("COMPLETED", 0) >= 2)


def test_a_row_that_makes_no_sense_harms_no_other(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "tick", noop)
    for name in ("a", "b", "c", "tick"):
        bus.schedules.create("orders", name, every="1s", command_type="tick")
    db.execute("UPDATE commandbus.schedule SET every = NULL, cron = 'never' WHERE name = 'a'")
    db.execute(
        "UPDATE commandbus.schedule SET every = NULL, cron = '0 0 * * *', timezone = 'Mars' WHERE name = 'b'"
    )
    db.execute("UPDATE commandbus.schedule SET headers = '[1]' WHERE name = 'c'")
    start_worker(handlers)
    until(lambda: len(firings(db, "tick")) >= 3)
    notes = dict(db.execute("SELECT name, note FROM commandbus.schedule").fetchall())
    assert "cannot be fired, the next try is in a minute" in notes["a"]
    assert "Mars" in notes["b"]
    assert notes["tick"] is None


@pytest.mark.slow
def test_two_releases_side_by_side(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry
) -> None:
    """A rolling deploy and its rollback, with real workers. The grace is short, so that it ends here, too."""

    def release(n: int) -> HandlerRegistry:
        registry = HandlerRegistry()
        registry.schedule("orders", "nightly", cron=f"0 {n} * * *")(noop)
        return registry

    def hour() -> str:
        row = db.execute("SELECT cron FROM commandbus.schedule").fetchone()
        return "" if row is None else row[0].split()[1]

    old = start_worker(release(1), schedule_grace=5)
    until(lambda: hour() == "1")
    new = start_worker(release(2), schedule_grace=5)
    until(lambda: hour() == "2")
    old.stop()
    again = start_worker(release(1), schedule_grace=5)  # an old one is restarted, while the new one lives
    until(lambda: one(db, "SELECT seen_at > now() - interval '1 s' FROM commandbus.schedule_declaration "
                          "ORDER BY first_seen LIMIT 1"))  # fmt: skip
    assert hour() == "2"
    new.stop()
    until(lambda: hour() == "1", 40)  # the rollback
    other = HandlerRegistry()
    other.register("orders", "tick", noop)
    start_worker(other, schedule_grace=5)
    again.stop()
    until(lambda: hour() == "", 60)  # nobody declares it any more


CLOCK = """
import time, datetime
shift = {shift}
real = time.time
time.time = lambda: real() + shift
class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(real() + shift, tz)
datetime.datetime = Shifted
from commandbus import HandlerRegistry, Worker
from support.workers import quick_settings
handlers = HandlerRegistry()
@handlers.schedule("orders", "tick", every="1s", missed="run_all")
def tick(command, ctx): ...
Worker(handlers, settings=quick_settings({url!r})).run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-7200, 7200])
def test_the_servers_clock_decides(database: str, bus: CommandBus, db: Db, shift: int) -> None:
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
    program = f"import sys; sys.path[:0] = {paths!r}\n" + CLOCK.format(shift=shift, url=database)
    worker = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: len(firings(db, "tick")) >= 3, 30)
        found = firings(db, "tick")
        assert is_without_gap(found)
        assert all(timedelta(0) <= late < timedelta(seconds=1) for _, late in found)
    finally:
        worker.terminate()
        worker.wait(20)


def test_what_a_registry_refuses(handlers: HandlerRegistry) -> None:
    declare = handlers.schedule("orders", "nightly", cron="30 2 * * *")
    declare(noop)
    declare(noop)
    assert [item.name for item in handlers.schedules] == ["nightly"]
    with pytest.raises(ValueError, match="schedule 'nightly' of domain 'orders' is declared twice, differently"):
        handlers.declare_schedule(Schedule("orders", "nightly", every="1h"))
    with pytest.raises(ValueError, match="already has the handler"):
        handlers.schedule("orders", "other", command_type="nightly", every="1h")(lambda command, ctx: None)
    with pytest.raises(TypeError, match="a schedule must be a Schedule"):
        handlers.declare_schedule("nightly")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither cron nor every is given"):
        handlers.schedule("orders", "x")
    stacked = handlers.handler("orders", "both", timeout=5)(lambda command, ctx: None)
    handlers.schedule("orders", "both", every="1h")(stacked)
    found = handlers.get("orders", "both")
    assert found is not None
    assert found.options.timeout == 5
    assert handlers.schedules_of(["billing"]) == []


def test_a_firing_does_not_wait_for_a_row_that_is_locked_elsewhere(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, database: str
) -> None:
    """Somebody's open transaction holds one schedule. The others fire; that one fires when the lock is gone."""
    handlers.register("orders", "tick", noop)
    for name in ("held", "free"):
        bus.schedules.create("orders", name, every="1s", command_type="tick")
    with psycopg.connect(database) as holder:
        holder.execute("SELECT FROM commandbus.schedule WHERE name = 'held' FOR UPDATE")
        start_worker(handlers)
        until(lambda: len(firings(db, "free")) >= 2)
        assert firings(db, "held") == []
        holder.rollback()
    within(5, lambda: firings(db, "held"))


@pytest.mark.long
def test_an_id_that_somebody_holds_delays_one_schedule_only(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, database: str
) -> None:
    handlers.register("orders", "tick", noop)
    for name in ("held", "free"):
        bus.schedules.create("orders", name, every="1s", command_type="tick")
    held = bus.schedules.next_firings("orders", "held", count=60)
    with psycopg.connect(database) as holder:
        holder.cursor().executemany(
            "INSERT INTO commandbus.command (domain, command_id, command_type) VALUES ('orders', %s, 'tick')",
            [(command_id_of("held", instant),) for instant in held],
        )
        start_worker(handlers)
        until(lambda: len(firings(db, "free")) >= 4, 30)
        assert firings(db, "held") == []
        holder.rollback()
    until(lambda: firings(db, "held"), 30)
