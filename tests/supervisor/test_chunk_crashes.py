"""A chunk that takes its worker with it: its members are suspects, nobody is charged, and each runs alone."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, NewCommand, Settings
from commandbus.db.drivers import run
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.rescue import Rule
from commandbus.model.crash_attribution import Cause, Death
from commandbus.model.retry import RetryPolicy
from commandbus.supervisor.coroner import Case, Coroner
from commandbus.supervisor.worker_messages import Hello
from commandbus.worker.board import SlotView
from commandbus.worker.running_file import RunningFile
from support.supervised import Supervised
from support.waiting import one, statuses, until, until_settled, verdicts

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]

CHUNKS = """
def insert(tx, commands):
    tx.cursor().executemany("INSERT INTO ledger VALUES (%s)", [(command.command_id,) for command in commands])

def first_time(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

@handlers.handler("orders", "poisoned", chunk=12, chunk_wait="2s", retry_policy=RetryPolicy(2, [0]))
def poisoned(commands, ctx):
    with ctx.transaction() as tx:
        insert(tx, commands)
        with Path("sizes").open("a") as sizes:
            sizes.write(f"{len(commands)} {os.getpid()}\\n")
        if any(command.command_id == "c05" for command in commands):
            ctypes.string_at(0)

@handlers.handler("orders", "before", chunk=12, chunk_wait="2s")
def before(commands, ctx):
    with ctx.transaction() as tx:
        insert(tx, commands)
        if first_time("before"):
            os.kill(os.getpid(), signal.SIGKILL)

@handlers.handler("orders", "after", chunk=12, chunk_wait="2s")
def after(commands, ctx):
    with ctx.transaction() as tx:
        insert(tx, commands)
    if first_time("after"):
        os.kill(os.getpid(), signal.SIGKILL)

@handlers.handler("orders", "waits", chunk=12, chunk_wait="2s", timeout=0)
def waits(commands, ctx):
    with ctx.transaction() as tx:
        insert(tx, commands)
        if first_time("waits"):
            Path("supervisor.waits").touch()
            time.sleep(1000)
"""


@pytest.fixture
def chunks(tasks: Path, db: Db, bus: CommandBus) -> Path:
    """The folder with chunk handlers, and their table."""
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + CHUNKS)
    db.execute("CREATE TABLE ledger (command_id text)")
    return tasks


def send(bus: CommandBus, command_type: str, prefix: str) -> list[str]:
    ids = [f"{prefix}{number:02}" for number in range(12)]
    bus.send_many("orders", [NewCommand(command_type, command_id=id_) for id_ in ids])
    return ids


def executions(db: Db) -> list[str]:
    return [name for (name,) in db.execute("SELECT command_id FROM ledger ORDER BY 1")]


def charges(db: Db) -> dict[int, int]:
    rows = db.execute("SELECT attempt - waived, count(*) FROM commandbus.command GROUP BY 1").fetchall()
    return dict(rows)


@pytest.mark.slow
def test_the_poisonous_command_of_a_chunk_is_found_and_the_others_are_not_charged(
    supervise: Supervise, chunks: Path, bus: CommandBus, db: Db
) -> None:
    ids = send(bus, "poisoned", "c")
    supervise(concurrency=3)
    until_settled(db, 60)
    assert statuses(db) == {"COMPLETED": 11, "IN_TROUBLESHOOTING_QUEUE": 1}
    assert one(db, "SELECT command_id FROM commandbus.command WHERE status <> 'COMPLETED'") == "c05"
    assert executions(db) == [id_ for id_ in ids if id_ != "c05"]
    assert one(db, "SELECT max(attempt - waived) FROM commandbus.command WHERE status = 'COMPLETED'") == 1
    runs = [line.split() for line in (chunks / "sizes").read_text().splitlines()]
    assert [size for size, _ in runs][:2] == ["12", "1"], "once as a chunk, then never again"
    assert {size for size, _ in runs[1:]} == {"1"}
    first, *_ = verdicts(db, "c00")
    assert first == (1, "WAIVED")
    assert "one of 12 that ran" in one(db, "SELECT error FROM commandbus.attempt WHERE number = 1 LIMIT 1")


@pytest.mark.slow
def test_kills_before_and_after_the_commit_run_nothing_twice(
    supervise: Supervise, chunks: Path, bus: CommandBus, db: Db
) -> None:
    supervise(concurrency=3)
    before = send(bus, "before", "b")
    until_settled(db, 60)
    after = send(bus, "after", "a")
    until_settled(db, 60)
    assert executions(db) == after + before
    assert (chunks / "before").exists()
    assert (chunks / "after").exists()
    assert charges(db) == {1: 24}
    assert verdicts(db, "a00") == [], "it was completed by the commit"


@pytest.mark.slow
def test_a_chunk_that_ends_with_its_supervisor_runs_one_by_one(
    supervise: Supervise, chunks: Path, bus: CommandBus, db: Db
) -> None:
    first = supervise(concurrency=3, visibility_timeout="1.1s")
    ids = send(bus, "waits", "w")
    until((chunks / "supervisor.waits").exists)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    supervise(concurrency=3, visibility_timeout="1.1s")
    until_settled(db, 60)
    assert executions(db) == ids
    assert charges(db) == {1: 12}
    assert {verdicts(db, id_)[0] for id_ in ids} == {(1, "LOST")}
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE suspect IS NOT NULL") == 12


@pytest.fixture
def coroner(database: str, bus: CommandBus) -> Iterator[Coroner]:
    coroner = Coroner(Settings(database_url=database), "test")
    coroner.start()
    yield coroner
    coroner.stop(5)


@pytest.mark.parametrize("is_known", [True, False])
def test_the_coroner_knows_who_ran_in_a_chunk(
    coroner: Coroner, bus: CommandBus, db: Db, database: str, is_known: bool
) -> None:
    """If the file that says it is missing, every held command of the type counts."""
    worker = f"dead-{time.monotonic_ns()}"
    bus.send_many("orders", [NewCommand("index", command_id=f"c{n}") for n in range(4)])
    bus.send("orders", "ship", command_id="ship")
    rows = run(db, claim(domain="orders", worker=worker, n=9, lease_seconds=30, cursor=None)).ready
    file = RunningFile.create(worker, ["orders"], 2, 5)
    assert file is not None
    file.enter_chunk(1, "orders", [row[0] for row in rows[:3]])
    if not is_known:
        file.remove()
    slot = SlotView(1, 0, rows[0][0], 1, time.monotonic(), math.inf, 101, 1, 0, is_chunk=True)
    hello = Hello(worker, ["orders"], {}, Rule(RetryPolicy(3, (0.0,), 0.0)))
    case = Case(hello, Death(Cause.EXITED, exit_code=1), [slot], time.monotonic(), Settings(database_url=database))
    coroner.add(case)
    until(lambda: not coroner.open_cases)
    given_back = ["c3", "ship"] if is_known else ["ship"]
    assert sorted(case.named["given back"]) == given_back
    assert case.settled["suspect"] == 5 - len(given_back)
    alone = one(db, "SELECT count(*) FROM commandbus.command WHERE suspect = 1 AND alone")
    assert alone == 5 - len(given_back)
