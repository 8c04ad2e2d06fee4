"""While many outcomes are unwritten, nothing is claimed; as soon as they are written, it goes on."""

from __future__ import annotations

from typing import Any

import pytest

from commandbus import CommandBus, HandlerRegistry, HealthState, NewCommand, Worker
from commandbus.worker.service_watch import ServiceWatch
from commandbus.worker.settler import Settler
from support.waiting import until
from support.workers import quick_settings

COUNT = 400


def _send(bus: CommandBus, handlers: HandlerRegistry) -> None:
    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        pass

    bus.send_many("orders", [NewCommand("ship") for _ in range(COUNT)])


def test_the_claimer_is_told_when_they_are_written(
    bus: CommandBus, handlers: HandlerRegistry, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are all idle then: nobody else would say so, and it would sleep until it looks by itself."""
    monkeypatch.setattr("commandbus.worker.dispatcher.MOST_UNWRITTEN", 0)
    monkeypatch.setattr("commandbus.worker.claimer.ROOM_SECONDS", 600.0)
    was_behind = []
    write = Settler._write_done

    def note(self: Settler, domain: str, attempts: Any) -> None:
        was_behind.append(worker._runtime is not None and worker._runtime.dispatcher.is_behind)
        write(self, domain, attempts)

    monkeypatch.setattr(Settler, "_write_done", note)
    _send(bus, handlers)
    worker = Worker(handlers, settings=quick_settings(database, concurrency=2))
    worker.start()
    try:
        until(lambda: worker.settled == COUNT)
    finally:
        worker.stop()
    assert any(was_behind), "the settler was never behind: this test has shown nothing"


def test_a_settler_that_is_behind_for_a_moment_is_no_trouble(
    bus: CommandBus, handlers: HandlerRegistry, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commandbus.worker.dispatcher.MOST_UNWRITTEN", -100)  # it is always behind
    monkeypatch.setattr("commandbus.worker.service_watch.BEHIND_SECONDS", 600.0)
    looks = []
    look = ServiceWatch.look

    def note(self: ServiceWatch, now: float) -> None:
        look(self, now)
        looks.append(now)

    monkeypatch.setattr(ServiceWatch, "look", note)
    _send(bus, handlers)
    worker = Worker(handlers, settings=quick_settings(database))
    worker.start()
    try:
        until(lambda: len(looks) >= 3)
        assert (worker.health_status.state, worker.settled) == (HealthState.HEALTHY, 0)
        monkeypatch.setattr("commandbus.worker.service_watch.BEHIND_SECONDS", 0.0)
        until(lambda: worker.health_status.state is HealthState.CRITICAL)
        assert "outcomes are not written yet" in str(worker.health_status.reasons)
    finally:
        worker.stop()
