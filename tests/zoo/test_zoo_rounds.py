"""Round after round of the zoo: processes, threads, files, connections and memory are what they were before."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from commandbus.testing import hang
from fleet import Fleet, running_fleet
from support.running import examples
from support.waiting import until

pytestmark = pytest.mark.shared_setup
ENDED = {"IN_TROUBLESHOOTING_QUEUE", "COMPLETED"}
CHEAP = ("hang.pg_sleep", "hang.double_lock", "isolated.sleep")
MEMORY_SLACK_MB = 8.0
STEADY_LOOKS = 25  # more than half a second
SLOTS = examples(5, thorough=10)
ROUNDS = examples(1, thorough=5)
MANY = examples(8, thorough=50)
# One of each way out: a stuck thread, a frozen worker, a crash, a killed one, too much memory, a stuck event loop.
MIXED = ("spin", "regex", "row_lock", "segfault", "stop", "hog", "fork", "block_loop", "sys_exit")


@pytest.fixture(scope="module")
def fleet(zoo_database: str) -> Iterator[Fleet]:
    """A wider fleet with shorter limits, so that many rounds take little time."""
    limits = {"WORKER_TASK_TIMEOUT": "0.6", "CANCEL_GRACE_SECONDS": "0.6"}
    with running_fleet(zoo_database, slots=SLOTS, **limits) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def warm(fleet: Fleet) -> None:
    """Every slot and the pool have been used, and processes of their own."""
    run_rounds(fleet, ["work_with_connection", "isolated.pollute"], 2 * SLOTS)


def run_rounds(fleet: Fleet, kinds: Iterable[str], times: int) -> None:
    """So many of each, as many at once as there are slots, one attempt each."""
    url = f"{fleet.url}?options=-c%20client_connection_check_interval%3D200ms"
    data = {"seconds": 60, "mb": 600, "database_url": url, "table": "locked", "id": 1}
    ids = [fleet.send(kind, data, max_attempts=1) for kind in kinds for _ in range(times)]
    fleet.until_status(ids, ENDED, 40 + 3 * len(ids) / SLOTS)


def fresh(fleet: Fleet) -> dict[str, int]:
    """What the fleet holds with a worker that has just been started, and nothing running."""
    before = fleet.workers()
    fleet.process.send_signal(signal.SIGHUP)
    until(lambda: len(now := fleet.workers()) == 1 and now != before, 15, what=lambda: fleet.workers())
    fleet.meet_at_once(10)
    return steady(fleet)


def steady(fleet: Fleet) -> dict[str, int]:
    """What it holds when that does not change any more."""
    last: list[dict[str, int]] = []

    def is_steady() -> bool:
        last.append(fleet.holdings())
        return len(last) > STEADY_LOOKS and all(found == last[-1] for found in last[-STEADY_LOOKS:])

    until(is_steady, 20, what=lambda: last[-3:])
    return last[-1]


@pytest.mark.slow
def test_many_rounds_leave_nothing_behind(fleet: Fleet) -> None:
    """Many of three kinds: canceled in the database, stuck in a thread, killed in a process of its own."""
    at_first, memory = fresh(fleet), fleet.resident_mb()
    for kind in CHEAP:
        run_rounds(fleet, [kind], MANY)
        fleet.meet_at_once(10)
    assert fresh(fleet) == at_first, [(name, query[:30]) for name, query in fleet.sessions()]
    assert fleet.resident_mb() < memory + MEMORY_SLACK_MB


@pytest.mark.slow
def test_many_rounds_in_one_and_the_same_worker_leave_nothing_behind(fleet: Fleet) -> None:
    """What neither drains nor kills a worker leaves no thread, file or connection in it."""
    kinds = ["hang.pg_sleep", "hang.close_connection", "hang.leave_thread", "isolated.sleep"]
    worker = warm_worker(fleet)
    at_first = held_by(worker)
    for kind in kinds:
        run_rounds(fleet, [kind], 3 if kind.endswith("thread") else MANY)
    fleet.meet_at_once(10)
    assert fleet.workers() == [worker]
    allowed = at_first["threads"] + 3  # the threads that leave_thread has left
    until(lambda: held_by(worker)["threads"] <= allowed, 10, what=lambda: (at_first, names_of(worker)))
    until(
        lambda: held_by(worker)["files"] <= at_first["files"],
        10,
        what=lambda: (at_first, names_of(worker)),
    )


def warm_worker(fleet: Fleet) -> int:
    """A worker with all slots, connections and processes that it will ever need at once.

    On a busy machine a canceled query may take longer than the grace. Then another worker takes over: it is new.
    """
    rounds: dict[int, int] = {}
    while max(rounds.values(), default=0) < 2:
        before = fleet.workers()
        run_rounds(fleet, ["hang.pg_sleep", "isolated.sleep"], 2 * SLOTS)
        fleet.meet_at_once(10, "meet_with_connection")
        if fleet.workers() == before and len(before) == 1:
            rounds[before[0]] = rounds.get(before[0], 0) + 1
    return max(rounds, key=lambda pid: rounds[pid])


def names_of(pid: int) -> list[str]:
    """What its threads are called, and what its files are."""
    threads = [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return threads + [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]


def held_by(pid: int) -> dict[str, int]:
    return {"threads": len(os.listdir(f"/proc/{pid}/task")), "files": len(os.listdir(f"/proc/{pid}/fd"))}


@pytest.mark.slow
def test_some_rounds_of_all_the_others_leave_nothing_behind(fleet: Fleet) -> None:
    """All at once, mixed: workers drain, freeze, crash and are killed, and others stand in."""
    at_first, memory = fresh(fleet), fleet.resident_mb()
    names = examples(MIXED, thorough=tuple(name for name in hang.ANIMALS if f"hang.{name}" not in CHEAP))
    for _ in range(ROUNDS):
        run_rounds(fleet, [f"hang.{name}" for name in names], 1)
        fleet.meet_at_once(15)
    assert fresh(fleet) == at_first, [(name, query[:30]) for name, query in fleet.sessions()]
    assert fleet.resident_mb() < memory + MEMORY_SLACK_MB
