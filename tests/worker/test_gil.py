"""A process that is a worker's alone hands over the GIL sooner; an application that has one keeps its interval."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from commandbus import CommandBus, HandlerRegistry, Worker
from support.waiting import until
from support.workers import quick_settings

PYTHONS, OURS = 0.005, 0.001


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def worker(bus: CommandBus, handlers: HandlerRegistry, database: str, seen: list[float]) -> Worker:
    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        seen.append(sys.getswitchinterval())

    bus.send("orders", "ship", command_id="a")
    return Worker(handlers, settings=quick_settings(database))


@pytest.fixture
def seen() -> list[float]:
    """The interval that the handler met."""
    return []


def test_while_the_main_thread_runs_the_worker(worker: Worker, seen: list[float]) -> None:
    worker.run(until_idle=True)
    assert seen == [pytest.approx(OURS)]
    assert sys.getswitchinterval() == pytest.approx(PYTHONS)


def test_a_smaller_interval_is_left(worker: Worker, seen: list[float]) -> None:
    sys.setswitchinterval(0.0005)
    worker.run(until_idle=True)
    assert seen == [pytest.approx(0.0005)]
    assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_another_thread_changes_nothing(worker: Worker, seen: list[float]) -> None:
    thread = threading.Thread(target=lambda: worker.run(until_idle=True))
    thread.start()
    thread.join()
    assert seen == [pytest.approx(PYTHONS)]


def test_nor_does_a_worker_that_an_application_starts(worker: Worker, seen: list[float]) -> None:
    worker.start()
    until(lambda: bool(seen))
    worker.stop()
    assert seen == [pytest.approx(PYTHONS)]
