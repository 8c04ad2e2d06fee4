"""Isolated attempts, with every child process gone at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry
from support.isolated_handlers import handlers
from support.isolating import Lab, MakeLab
from support.workers import quick_settings


@pytest.fixture
def make_lab(database: str, bus: CommandBus, db: psycopg.Connection[Any]) -> Iterator[MakeLab]:
    """Makes started labs; closed at the end."""
    made: list[Lab] = []
    db.execute("CREATE TABLE effects (what text)")

    def make(registry: HandlerRegistry = handlers, **changes: Any) -> Lab:
        settings = quick_settings(database, **{"concurrency": 1} | changes)  # so no child process is started ahead
        lab = Lab(bus, db, settings, registry)
        lab.isolation.start()
        made.append(lab)
        return lab

    yield make
    for lab in made:
        lab.close()
        assert lab.isolation.pids() == []


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    """One of them."""
    return make_lab()
