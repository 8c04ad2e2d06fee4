"""With breakers on: five animals that hang, in several workers of a fleet, and their kind is left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet import DOMAIN, Fleet, running_fleet
from support.waiting import one, until

pytestmark = pytest.mark.shared_setup


@pytest.fixture(scope="module")
def fleet(zoo_database: str) -> Iterator[Fleet]:
    """The usual fleet, with breakers as they are by default."""
    with running_fleet(zoo_database, WORKER_BREAKERS="true") as fleet:
        yield fleet


def test_five_stuck_attempts_open_the_breaker_and_other_types_go_on(fleet: Fleet) -> None:
    ids = [fleet.send("hang.sleep", {"seconds": 60}, max_attempts=1) for _ in range(5)]
    fleet.until_status(ids, {"IN_TROUBLESHOOTING_QUEUE"}, 30)
    until(lambda: [info.state for info in fleet.bus.breakers()] == ["OPEN"])
    fleet.db.execute("UPDATE commandbus.breaker SET until = until + interval '1 hour'")  # for a slow machine
    sixth = fleet.send("hang.sleep", {"seconds": 60}, max_attempts=1)
    record = until(lambda: (found := fleet.bus.get_command(DOMAIN, sixth)) and found.waiting_for and found, 30)
    assert record.waiting_for == "breaker"
    assert record.waiting_note.startswith("breaker open: 5 of 5 attempts stuck since ")
    assert "UTC (5 commands), the last: ExecutionStuck: did not" in record.waiting_note
    assert [(each.verdict, each.code) for each in fleet.attempts(sixth)] == [("PARKED", "BREAKER_OPEN")]
    healthy = fleet.send_healthy(20)
    fleet.until_status(healthy, {"COMPLETED"}, 20)
    other = fleet.send("hang.double_lock", max_attempts=1)
    fleet.until_status([other], {"IN_TROUBLESHOOTING_QUEUE"}, 20)
    assert fleet.statuses([sixth]) == {sixth: "PENDING"}


def test_a_kind_that_kills_its_workers_is_left_alone_too(fleet: Fleet) -> None:
    """The coroner tells of the culprits that it names. One after the other, so that each can be named."""
    ids = []
    for _ in range(5):
        ids.append(fleet.send("hang.segfault", max_attempts=1))
        fleet.until_status(ids, {"IN_TROUBLESHOOTING_QUEUE"}, 40)
    until(
        lambda: (
            one(fleet.db, "SELECT state FROM commandbus.breaker WHERE command_type = 'hang.segfault'") == "OPEN"
        )
    )
    reason = one(fleet.db, "SELECT reason FROM commandbus.breaker WHERE command_type = 'hang.segfault'")
    assert reason.startswith("5 of 5 attempts stuck since ")
    assert "UTC (5 commands), the last: WorkerLost: the worker process died of SIGSEGV" in reason
