"""The zoo in a worker inside an application: no supervisor, so nothing may end or freeze the process.

A stuck slot is replaced and claiming goes on: the worker never drains. What was given up wakes up in the end, here
after a second and a half, and finds itself fenced.
"""

from __future__ import annotations

import asyncio
import locale
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from zoo_handlers import MARK, fill, meet, work, work_with_connection

from commandbus import CommandBus, HandlerRegistry, HealthState, NewCommand, Worker
from commandbus.testing import hang
from fleet import DOMAIN, Db, Meeting, attempts_of, late_marks
from support.waiting import until
from support.workers import quick_settings

SLOTS = 3
SHORT = {
    "task_timeout": 0.8,  # a pool whose connections were all taken away needs a moment on a busy machine
    "cancel_grace": 1.0,  # what is harmless must be able to end within it, on a busy machine, too
    "visibility_timeout": 2.0,
    "statement_timeout": 1.5,
    "concurrency": SLOTS,
    "max_attempts": 2,
}
HANG_SECONDS = 2.5
HARMLESS = [animal.name for animal in hang.ANIMALS.values() if not animal.needs_supervisor]


@pytest.fixture
def db(zoo_database: str) -> Iterator[Db]:
    with psycopg.connect(zoo_database, autocommit=True) as conn:
        yield conn


@pytest.fixture
def bus(zoo_database: str) -> Iterator[CommandBus]:
    with CommandBus(zoo_database) as bus:
        yield bus


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.close()


@pytest.fixture(autouse=True)
def unpolluted() -> Iterator[None]:
    """Nobody puts the process of an application right: here the test does."""
    folder, umask, language = os.getcwd(), os.umask(0o022), locale.setlocale(locale.LC_ALL)
    os.umask(umask)
    yield
    os.chdir(folder)
    os.umask(umask)
    locale.setlocale(locale.LC_ALL, language)


@pytest.fixture
def worker(zoo_database: str, db: Db) -> Iterator[Worker]:
    """A worker in this process; when it is gone, so are the threads that were left behind."""
    handlers = HandlerRegistry()
    handlers.register(DOMAIN, "work", work)
    handlers.register(DOMAIN, "work_with_connection", work_with_connection)
    handlers.register(DOMAIN, "meet", meet, timeout=60)
    fill(handlers, HARMLESS)
    worker = Worker(handlers, settings=quick_settings(zoo_database, **SHORT), name="zoo")
    worker.start()
    yield worker
    worker.stop(wait=5)
    until(lambda: not threads_of(worker), 10, what=lambda: threads_of(worker))


def threads_of(worker: Worker) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(worker.id)]


def slots_of(worker: Worker) -> int:
    return sum("-slot-" in name for name in threads_of(worker))


def loops_of(worker: Worker) -> int:
    return sum(name.endswith("-loop") for name in threads_of(worker))


def meet_at_once(bus: CommandBus, meeting: Meeting, prefix: str) -> None:
    ids = [f"{prefix}-meet-{index}" for index in range(SLOTS)]
    data = {"port": meeting.port}
    bus.send_many(DOMAIN, [NewCommand("meet", data, command_id=item, max_attempts=1) for item in ids])
    meeting.until_present(SLOTS, 20)
    meeting.let_go()


@pytest.mark.parametrize("name", HARMLESS)
def test_the_worker_goes_on_and_never_drains(
    name: str, bus: CommandBus, db: Db, worker: Worker, meeting: Meeting, zoo_database: str
) -> None:
    healthy = [f"{name}-{index}" for index in range(20)]
    bus.send_many(DOMAIN, [NewCommand("work", command_id=item, max_attempts=1) for item in healthy[:10]])
    data = {"seconds": HANG_SECONDS, "database_url": zoo_database, "connection": True}
    with psycopg.connect(zoo_database) as holder:
        holder.execute("SELECT FROM locked FOR UPDATE")
        bus.send(DOMAIN, f"hang.{name}", data, command_id=name)
        bus.send_many(DOMAIN, [NewCommand("work", command_id=item, max_attempts=1) for item in healthy[10:]])
        until(lambda: final_status(db, name), 10, what=lambda: attempts_of(db, name))
    meet_at_once(bus, meeting, name)
    until(lambda: all(final_status(db, item) == "COMPLETED" for item in healthy), 10)
    assert (worker.is_running, worker.state) == (True, "ACTIVE")
    history, stopped_by = attempts_of(db, name), hang.ANIMALS[name].stopped_by
    if stopped_by is not None:
        assert [(attempt.verdict, attempt.rung) for attempt in history] == [
            ("RETRY", stopped_by),
            ("EXHAUSTED", stopped_by),
        ]
    # The zombies wake up, find themselves replaced and end.
    until(lambda: slots_of(worker) == SLOTS and loops_of(worker) == 1, 10, what=lambda: threads_of(worker))
    assert late_marks(db, name) == []
    meet_at_once(bus, meeting, f"{name}-again")


def final_status(db: Db, command_id: str) -> str | None:
    row = db.execute("SELECT status FROM commandbus.command WHERE command_id = %s", (command_id,)).fetchone()
    return None if row is None or row[0] == "PENDING" else str(row[0])


def test_three_stuck_are_critical_and_the_worker_still_works(
    bus: CommandBus, db: Db, worker: Worker, meeting: Meeting
) -> None:
    ids = [f"critical-{index}" for index in range(SLOTS)]
    for item in ids[:2]:
        bus.send(DOMAIN, "hang.sleep", {"seconds": HANG_SECONDS}, command_id=item, max_attempts=1)
    until(lambda: all(final_status(db, item) for item in ids[:2]), 10)
    assert worker.health_status.state is not HealthState.CRITICAL
    bus.send(DOMAIN, "hang.double_lock", {"seconds": HANG_SECONDS}, command_id=ids[2], max_attempts=1)
    until(lambda: final_status(db, ids[2]), 10)
    assert worker.health_status.state is HealthState.CRITICAL
    assert worker.health_status.stuck_threads == 3
    meet_at_once(bus, meeting, "critical")
    assert (worker.is_running, worker.state) == (True, "ACTIVE")


@pytest.mark.long
def test_all_slots_of_both_lanes_stuck_at_once(
    bus: CommandBus, db: Db, worker: Worker, meeting: Meeting, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ["sleep", "swallow_cancel", "block_loop", "spin", "double_lock", "swallow"]
    data = {"seconds": HANG_SECONDS}
    ids = [f"all-{kind}" for kind in kinds]
    bus.send_many(DOMAIN, [NewCommand(f"hang.{kind}", data, command_id=f"all-{kind}") for kind in kinds])
    until(lambda: all(final_status(db, item) for item in ids), 20, what=lambda: [attempts_of(db, i) for i in ids])
    meet_at_once(bus, meeting, "all")
    until(lambda: slots_of(worker) == SLOTS and loops_of(worker) == 1, 10, what=lambda: threads_of(worker))
    for item in ids:
        charged = [attempt for attempt in attempts_of(db, item) if attempt.verdict not in ("WAIVED", "GIVEN_BACK")]
        assert [(attempt.verdict, attempt.rung) for attempt in charged] == [
            ("RETRY", "stuck"),
            ("EXHAUSTED", "stuck"),
        ]
        assert late_marks(db, item) == []
        said = [line for line in caplog.messages if f" {item} " in line and "tries used" in line]
        assert len(said) == 2, "what has been given up says nothing more when it ends"


def test_all_connections_in_the_hands_of_stuck_attempts(zoo_database: str, bus: CommandBus, db: Db) -> None:
    """TRAPS 9: they are not returned, so the pool is told that they are lost; who comes after gets new ones."""
    release, handlers = threading.Event(), HandlerRegistry()

    @handlers.handler(DOMAIN, "hold")
    def hold(command: Any, ctx: Any) -> None:
        with ctx.connection():
            release.wait(30)

    @handlers.handler(DOMAIN, "work", timeout=20)
    def work(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            conn.execute("SELECT 1")

    ids, after = ([f"{kind}-{index}" for index in range(SLOTS)] for kind in ("hands", "hands-after"))
    bus.send_many(DOMAIN, [NewCommand("hold", command_id=item, max_attempts=1) for item in ids])
    with Worker(handlers, settings=quick_settings(zoo_database, **SHORT | {"pool_timeout": 2.0})):
        try:
            until(lambda: all(final_status(db, item) for item in ids), 10)
            bus.send_many(DOMAIN, [NewCommand("work", command_id=item, max_attempts=1) for item in after])
            until(lambda: all(final_status(db, item) for item in after), 10)
        finally:
            release.set()
    assert {final_status(db, item) for item in after} == {"COMPLETED"}


class Left:
    """What a thread that was left behind found out."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: BaseException | None = None
        self.done = threading.Event()

    def try_to(self, act: Callable[[], None]) -> None:
        self.go.wait(10)
        try:
            act()
        except BaseException as error:
            self.error = error
        self.done.set()


@pytest.mark.parametrize("way", ["connection", "transaction"])
def test_what_is_left_behind_gets_no_connection(zoo_database: str, bus: CommandBus, db: Db, way: str) -> None:
    """The handler has returned; its context is of no more use to a thread that it left behind."""
    left, handlers = Left(), HandlerRegistry()

    @handlers.handler(DOMAIN, "leave")
    def leave(command: Any, ctx: Any) -> None:
        def write() -> None:
            with getattr(ctx, way)() as conn:
                conn.execute("INSERT INTO marker (command_id, place) VALUES (%s, 'left')", (command.command_id,))

        threading.Thread(target=left.try_to, args=(write,), daemon=True).start()

    with Worker(handlers, settings=quick_settings(zoo_database, **SHORT)):
        bus.send(DOMAIN, "leave", command_id=f"leave-{way}")
        until(lambda: final_status(db, f"leave-{way}") == "COMPLETED")
        left.go.set()
        assert left.done.wait(5)
    assert type(left.error).__name__ == "AttemptFencedError"
    assert db.execute("SELECT FROM marker WHERE place = 'left'").fetchall() == []


def test_a_connection_that_is_left_in_use_is_taken_away(zoo_database: str, bus: CommandBus, db: Db) -> None:
    """A thread goes on with the context's connection after the handler has returned: the pool loses none."""
    lefts, handlers = [Left() for _ in range(SLOTS + 1)], HandlerRegistry()

    @handlers.handler(DOMAIN, "leave")
    def leave(command: Any, ctx: Any) -> None:
        left, holds = lefts[command.data], threading.Event()

        def hold() -> None:
            with ctx.connection() as conn:
                conn.execute("INSERT INTO marker (command_id, place) VALUES (%s, 'held')", (command.command_id,))
                holds.set()
                left.go.wait(10)
                conn.execute("SELECT 1")

        left.go.clear()
        release = threading.Thread(target=run, args=(left, hold), daemon=True)
        release.start()
        assert holds.wait(5)

    def run(left: Left, hold: Callable[[], None]) -> None:
        try:
            hold()
        except BaseException as error:
            left.error = error
        left.done.set()

    with Worker(handlers, settings=quick_settings(zoo_database, **SHORT)):
        for number in range(SLOTS + 1):  # more than the pool has
            bus.send(DOMAIN, "leave", number, command_id=f"held-{number}", max_attempts=1)
        until(lambda: all(final_status(db, f"held-{number}") == "COMPLETED" for number in range(SLOTS + 1)))
        until(lambda: db.execute(
            "SELECT count(*) FROM pg_stat_activity " "WHERE datname = current_database() "
            "AND application_name LIKE '%handlers' "
            "AND state = 'idle in transaction'").fetchone() == (0,))  # fmt: skip
        for left in lefts:
            left.go.set()
            assert left.done.wait(5)
            assert isinstance(left.error, psycopg.OperationalError)
    assert db.execute("SELECT FROM marker WHERE place = 'held'").fetchall() == []


@pytest.mark.parametrize("lane", ["sync", "async"])
def test_a_forked_copy_of_the_worker_does_nothing(
    zoo_database: str, bus: CommandBus, db: Db, lane: str, tmp_path: Path
) -> None:
    """fork() without exec, in the middle of a transaction, and both processes return from the handler. The copy
    must run nothing that waits or runs beside it, and must not speak to the server on its parent's connection."""
    handlers, copies, noted = HandlerRegistry(), [], tmp_path / "noted"

    def until_ended(copy: int) -> None:
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        until(lambda: os.waitid(os.P_PID, copy, how), 5)

    def sync_handler(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(MARK, (command.command_id, os.getpid(), "fork"))
            if child := os.fork():
                copies.append(child)
                until_ended(child)

    async def async_handler(command: Any, ctx: Any) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(MARK, (command.command_id, os.getpid(), "fork"))
            if child := os.fork():
                copies.append(child)
                await asyncio.to_thread(until_ended, child)

    @handlers.handler(DOMAIN, "note")
    def note(command: Any, ctx: Any) -> None:
        with noted.open("a") as file:  # what a copy adds to a list, nobody sees
            file.write(f"{os.getpid()} {command.command_id}\n")
        time.sleep(0.05)

    handlers.register(DOMAIN, "fork", sync_handler if lane == "sync" else async_handler)
    with Worker(
        handlers, settings=quick_settings(zoo_database, **SHORT | {"concurrency": 2, "task_timeout": 10.0})
    ):
        ids = [f"{lane}-fork-{index}" for index in range(8)]
        for item in ids:
            bus.send(DOMAIN, "fork" if item.endswith(("0", "4")) else "note", command_id=item, max_attempts=1)
        until(lambda: all(final_status(db, item) == "COMPLETED" for item in ids), 10)
        assert len(copies) == 2
        for child in copies:
            until(lambda child=child: os.waitpid(child, os.WNOHANG) != (0, 0), 5, what="the copy ends by itself")
    rows = db.execute(
        "SELECT command_id, attempt FROM marker WHERE command_id LIKE %s", (f"{lane}-fork%",)
    ).fetchall()
    assert sorted(rows) == [(f"{lane}-fork-0", os.getpid()), (f"{lane}-fork-4", os.getpid())]
    notes = [item for item in ids if not item.endswith(("0", "4"))]
    assert sorted(noted.read_text().splitlines()) == [f"{os.getpid()} {item}" for item in notes]
