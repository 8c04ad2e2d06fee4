"""A thread of ours that hears nothing from the database: /health/ready names it, and it comes back by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commandbus import CommandBus, CommandStatus
from support.network import Proxy
from support.supervised import Supervised
from support.waiting import until, within

Supervise = Callable[..., Supervised]
NAMED_SECONDS = 15.0


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """A network between the supervisor with its workers and the database."""
    found = re.search(r":(\d+)/", database)
    assert found is not None
    proxy = Proxy(int(found[1]))
    yield proxy
    proxy.close()


def is_completed(bus: CommandBus, command_id: str) -> bool:
    found = bus.get_command("orders", command_id)
    return found is not None and found.status is CommandStatus.COMPLETED


@pytest.mark.slow
@pytest.mark.parametrize("part", ["claimer", "settler", "lease keeper", "coroner"])
def test_it_is_named_in_time_and_nothing_is_lost(
    supervise: Supervise, bus: CommandBus, database: str, proxy: Proxy, part: str
) -> None:
    through = re.sub(r":\d+/", f":{proxy.port}/", database)
    supervised = supervise(database_url=through, visibility_timeout="60s").until_ready()
    bus.send("orders", "quick", command_id="before")
    until(lambda: is_completed(bus, "before"))
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    assert proxy.silence(part.encode()) == 1
    bus.send("orders", "quick", command_id="after")

    def unready() -> Any:
        code, text = supervised.ask("/health/ready")
        return code == 503 and f"the {part} has had no answer" in str(text)

    within(NAMED_SECONDS, unready, what=lambda: supervised.ask("/health/ready"))
    until(lambda: is_completed(bus, "after"), 30)
    until(lambda: supervised.ask("/health/ready")[0] == 200)
