"""Processes are tested with a migrated database, a bus, and the domains that they use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commandbus import CommandBus


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        for domain in ("orders", "processes"):
            bus.create_domain(domain)
        yield bus
