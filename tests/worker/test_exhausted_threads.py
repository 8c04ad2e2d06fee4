"""One handler has started all threads: its neighbors are not charged, and slots come back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Worker
from commandbus.worker.isolation.isolation import Isolation
from support.isolated_handlers import handlers as isolated
from support.waiting import until, until_settled, verdicts
from support.workers import add, done, either

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
STARTERS = [name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name)]


class Threads:
    """Whether this process can start threads."""

    def __init__(self) -> None:
        self.are_left = True
        self.refused = 0


@pytest.fixture
def threads(bus: CommandBus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    """As many as one likes, until `are_left` is False. The pool of the bus has its threads already."""
    bus.list_domains()
    state = Threads()
    for name in STARTERS:
        real = getattr(threading, name)

        def start(*args: Any, real: Any = real, **options: Any) -> Any:
            if not state.are_left:
                state.refused += 1
                raise RuntimeError("can't start new thread")
            return real(*args, **options)

        monkeypatch.setattr(threading, name, start)
    yield state
    state.are_left = True


def test_a_neighbor_that_needs_a_thread_for_its_connection_is_not_charged(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, threads: Threads
) -> None:
    async def work(command: Any, ctx: Any) -> str:
        async with either(ctx.connection()) as conn:
            await done(conn.execute("SELECT 1"))
        return f"attempt {ctx.attempt} of {ctx.max_attempts}"

    add(handlers, lane, "work", work)
    start_worker(handlers)
    threads.are_left = False
    bus.send("orders", "work", command_id="c", max_attempts=1)
    until(lambda: verdicts(db, "c"))
    threads.are_left = True
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert found.result == "attempt 1 of 1"
    assert {verdict for _, verdict in verdicts(db, "c")} == {"WAIVED"}
    first = bus.get_attempts("orders", "c")[0]
    assert first.error_code == "EXHAUSTED"
    assert "can't start new thread" in (first.error or "")
    assert len(verdicts(db, "c")) < 5, "it was tried again at once, and again, and again"


def test_a_handlers_own_lack_of_threads_is_its_own_failure(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, threads: Threads
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        threading.Thread(target=print).start()

    add(handlers, lane, "work", work)
    start_worker(handlers)
    threads.are_left = False
    bus.send("orders", "work", command_id="c", max_attempts=1)
    until(lambda: verdicts(db, "c") == [(1, "EXHAUSTED")])


def test_the_slot_of_a_stuck_attempt_comes_back_when_there_are_threads_again(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    threads: Threads,
    go_on: threading.Event,
) -> None:
    """A stuck thread in the sync lane; in the async lane a blocked event loop, which needs a new thread."""
    started = threading.Event()

    async def hang(command: Any, ctx: Any) -> None:
        started.set()
        go_on.wait(30)

    async def quick(command: Any, ctx: Any) -> str:
        return "done"

    add(handlers, lane, "hang", hang, timeout=0.3)
    add(handlers, lane, "quick", quick)
    worker = start_worker(handlers, concurrency=1, cancel_grace=0.3)
    bus.send("orders", "hang", command_id="h", max_attempts=1)
    assert started.wait(60)
    threads.are_left = False
    until(lambda: verdicts(db, "h") == [(1, "EXHAUSTED")])
    until(lambda: threads.refused)
    refused = threads.refused
    bus.send("orders", "quick", command_id="q", max_attempts=1)
    until(lambda: threads.refused > refused)  # a slot was to be replaced again, in vain
    threads.are_left = True
    until_settled(db)
    found = bus.get_command("orders", "q")
    assert found is not None
    assert (found.result, found.charged_attempts) == ("done", 1)
    assert worker.is_running


def test_an_attempt_for_which_no_process_can_be_started_is_given_back(
    bus: CommandBus, db: Db, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, is_exhausted = Isolation._make, True

    def fail(isolation: Isolation) -> Any:
        if is_exhausted:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return make(isolation)

    monkeypatch.setattr(Isolation, "_make", fail)
    start_worker(isolated, concurrency=2)
    bus.send("orders", "echo", {"n": 1}, command_id="c", max_attempts=1)
    until(lambda: verdicts(db, "c"))
    is_exhausted = False
    until_settled(db)
    found = bus.get_command("orders", "c")
    assert found is not None
    assert found.result["attempt"] == 1
    assert {verdict for _, verdict in verdicts(db, "c")} == {"GIVEN_BACK"}
    assert len(verdicts(db, "c")) < 6
