"""Quarantine: the second hang of a command is in a child process, where it disturbs nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandStatus
from support.supervised import Supervised
from support.waiting import one, until

pytestmark = pytest.mark.waits
Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]
TSQ = CommandStatus.IN_TROUBLESHOOTING_QUEUE

HANGS = """
@handlers.handler("orders", "hang")
def hang(command, ctx):
    with Path("starts").open("a") as starts:
        starts.write(f"{command.command_id} {os.getpid()} {os.getppid()}\\n")
    time.sleep(1000)

@handlers.handler("orders", "hold_gil")
def hold_gil(command, ctx):
    with Path("starts").open("a") as starts:
        starts.write(f"{command.command_id} {os.getpid()} {os.getppid()}\\n")
    re.match(r"(a+)+$", "a" * 40 + "b")

@handlers.handler("orders", "beat", timeout=0)
def beat(command, ctx):
    Path(command.command_id + ".started").write_text(str(os.getpid()))
    longest, last = 0.0, time.monotonic()
    while not Path("go").exists():
        time.sleep(0.02)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest
"""


@pytest.fixture
def hanging(tasks: Path) -> Path:
    """The folder with handlers that hang and note their starts."""
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + HANGS)
    return tasks


def starts(folder: Path) -> list[tuple[str, int, int]]:
    """Command, process, and its parent, start by start."""
    file = folder / "starts"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(command, int(pid), int(parent)) for command, pid, parent in lines]


def status_of(bus: CommandBus, command_id: str) -> CommandStatus:
    record = bus.get_command("orders", command_id)
    assert record is not None
    return record.status


def history(db: Db, command_id: str) -> list[tuple[str, str | None]]:
    """Verdict and rung of its attempts that were not just given back."""
    return db.execute(
        "SELECT a.verdict, a.rung FROM commandbus.attempt a JOIN commandbus.command c ON c.id = a.command "
        "WHERE c.command_id = %s AND a.verdict <> 'GIVEN_BACK' ORDER BY a.number",
        (command_id,),
    ).fetchall()


@pytest.mark.parametrize(("kind", "first"), [("hang", "stuck"), ("hold_gil", "kill")])
def test_the_second_hang_is_in_a_child_process_and_disturbs_nobody(
    supervise: Supervise, hanging: Path, bus: CommandBus, db: Db, kind: str, first: str
) -> None:
    supervised = supervise(max_attempts=3, concurrency=2).until_ready()
    bus.send("orders", kind, command_id="poison")
    until(lambda: len(starts(hanging)) == 2, what="it is tried again")
    bus.send("orders", "beat", command_id="healthy")
    until(lambda: (hanging / "healthy.started").exists())
    until(lambda: status_of(bus, "poison") is TSQ)
    assert history(db, "poison") == [("RETRY", first), ("RETRY", "kill"), ("EXHAUSTED", "kill")]
    (_, thread, _), *children = starts(hanging)
    (worker,) = {parent for _, _, parent in children}
    assert worker != thread, "the first hang cost its worker"
    assert worker == int((hanging / "healthy.started").read_text()), "and the next ones only a child of the second"
    (hanging / "go").touch()
    until(lambda: status_of(bus, "healthy") is CommandStatus.COMPLETED)
    assert one(db, "SELECT result::text::float8 < 1 FROM commandbus.command WHERE command_id = 'healthy'")
    assert history(db, "healthy") == []
    assert supervised.log.count("is ready (process") == 2


@pytest.mark.parametrize(("slots", "processes"), [(3, 1), (2, 2)])
def test_a_dead_api_does_not_fill_every_slot_with_children(
    supervise: Supervise, hanging: Path, bus: CommandBus, db: Db, slots: int, processes: int
) -> None:
    """Of two slots one stays free, although there may be two processes."""
    supervise(max_attempts=2, concurrency=slots, quarantine_processes=processes, task_timeout="1s").until_ready()
    names = [f"c{n}" for n in range(slots)]
    for name in names:
        bus.send("orders", "hang", command_id=name)
    until(lambda: len(starts(hanging)) == slots + 1, what="they hang, and one is tried again")
    bus.send("orders", "quick", command_id="healthy")
    until(lambda: status_of(bus, "healthy") is CommandStatus.COMPLETED, 5)
    most = 0

    def is_over() -> bool:
        nonlocal most
        alive = [pid for _, pid, _ in starts(hanging)[slots:] if is_running(pid)]
        most = max(most, len(set(alive)))
        return all(status_of(bus, name) is TSQ for name in names)

    until(is_over, 60)
    assert most == 1
    assert [len([start for start in starts(hanging) if start[0] == name]) for name in names] == [2] * slots
    assert one(db, "SELECT count(*) > 0 FROM commandbus.attempt WHERE verdict = 'GIVEN_BACK'")


@pytest.mark.slow
def test_of_three_in_quarantine_two_run_at_once_and_the_third_holds_no_slot(
    supervise: Supervise, hanging: Path, bus: CommandBus, db: Db
) -> None:
    supervise(max_attempts=2, concurrency=4, quarantine_processes=2, task_timeout="4s").until_ready()
    names = ["c0", "c1", "c2"]
    for name in names:
        bus.send("orders", "hang", command_id=name)
    until(lambda: len(starts(hanging)) == 3, what="they hang in the worker")
    most: list[int] = []

    def are_two_at_once() -> bool:
        alive = {pid for _, pid, _ in starts(hanging)[3:] if is_running(pid)}
        most.append(len(alive))
        return len(alive) == 2

    until(are_two_at_once, 60)
    for name in ("b0", "b1"):
        bus.send("orders", "beat", command_id=name)
    until(
        lambda: (hanging / "b0.started").exists() and (hanging / "b1.started").exists(), what="two slots are free"
    )
    (hanging / "go").touch()
    until(lambda: are_two_at_once() or all(status_of(bus, name) is TSQ for name in names), 60)
    until(lambda: (are_two_at_once(), all(status_of(bus, name) is TSQ for name in names))[1], 60)
    assert max(most) == 2
    assert [len([start for start in starts(hanging) if start[0] == name]) for name in names] == [2, 2, 2]
    given_back = "FROM commandbus.attempt WHERE verdict = 'GIVEN_BACK' AND started_at IS NULL"
    assert one(db, f"SELECT count(DISTINCT command) {given_back}") >= 1, "the third was given back"
    assert one(db, f"SELECT bool_and(retry_at > finished_at) {given_back} AND error LIKE '%%quarantine%%'")
    charged = "SELECT min(attempt) >= 2 FROM commandbus.tsq"
    assert one(db, charged), "all were tried twice"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_quarantine_every_hang_costs_a_worker(
    supervise: Supervise, hanging: Path, bus: CommandBus, db: Db
) -> None:
    supervise(max_attempts=2, quarantine="false").until_ready()
    bus.send("orders", "hang", command_id="poison")
    until(lambda: status_of(bus, "poison") is TSQ)
    assert history(db, "poison") == [("RETRY", "stuck"), ("EXHAUSTED", "stuck")]


def test_a_named_culprit_goes_on_in_quarantine(supervise: Supervise, bus: CommandBus, db: Db) -> None:
    supervised = supervise(max_attempts=3).until_ready()
    bus.send("orders", "segfault", command_id="poison")
    until(lambda: status_of(bus, "poison") is TSQ)
    assert history(db, "poison") == [("RETRY", "crash"), ("RETRY", "crash"), ("EXHAUSTED", "crash")]
    assert supervised.log.count("is ready (process") <= 2, "one worker died of it"
