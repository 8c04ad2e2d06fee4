"""kill -9 of a supervisor: nobody is left who could say what happened, so losses make suspects that run alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from commandbus import CommandBus, CommandStatus, NewCommand
from support.supervised import Supervised
from support.waiting import one, statuses, until, until_settled, verdicts

pytestmark = pytest.mark.waits
Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]

NOTES = '''
@handlers.handler("orders", "note", timeout=0)
def note(command, ctx):
    """Notes every start, who is here, and when it left; runs until a file appears."""
    mine = f"{command.command_id}.{os.getpid()}.here"
    Path(mine).write_text("")
    with Path("starts").open("a") as starts:
        starts.write(f"{command.command_id} {os.getpid()} {len(list(Path().glob('*.here')))}\\n")
    while not Path("go").exists():
        time.sleep(0.02)
    Path(mine).unlink()

@handlers.handler("orders", "instant")
def instant(command, ctx):
    """Does nothing."""

@handlers.handler("orders", "end_all", timeout=0)
def end_all(command, ctx):
    """Ends the whole container, as the kernel does with memory.oom.group."""
    with Path("starts").open("a") as starts:
        starts.write(f"{command.command_id} {os.getpid()} 0\\n")
    while not Path("supervisor").exists():
        time.sleep(0.02)
    pid = int(Path("supervisor").read_text())
    Path("supervisor").unlink()
    os.kill(pid, signal.SIGKILL)
    time.sleep(1000)
'''


@pytest.fixture
def noting(tasks: Path) -> Path:
    """The folder with handlers that note their starts."""
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + NOTES)
    return tasks


def starts(folder: Path) -> list[tuple[str, int, int]]:
    """Command, process, and how many were there, start by start."""
    file = folder / "starts"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(command, int(pid), int(count)) for command, pid, count in lines]


def kill_all(supervised: Supervised, folder: Path) -> None:
    """kill -9 of the supervisor; its workers and their children end with it."""
    os.kill(supervised.process.pid, signal.SIGKILL)
    supervised.process.wait()
    until(lambda: not supervised.processes(), what=lambda: supervised.processes())
    for file in folder.glob("*.here"):
        file.unlink()


def status_of(bus: CommandBus, command_id: str) -> CommandStatus:
    record = bus.get_command("orders", command_id)
    assert record is not None
    return record.status


def charged(db: Db, command_id: str) -> int:
    """How many of its attempts count against its limit, without the one that runs."""
    return int(
        one(
            db,
            "SELECT q.read_ct - c.waived - (q.headers IS NOT NULL)::int FROM commandbus.command c "
            "JOIN pgmq.q_orders__commands q ON q.msg_id = c.msg_id WHERE c.command_id = %s",
            command_id,
        )
    )


def test_three_kills_of_a_supervisor_bring_no_healthy_command_into_the_troubleshooting_queue(
    supervise: Supervise, noting: Path, bus: CommandBus, db: Db
) -> None:
    names = [f"c{n}" for n in range(3)]
    supervised = supervise(max_attempts=3, concurrency=4, visibility_timeout="1.1s", statement_timeout="1s")
    for name in names:
        bus.send("orders", "note", command_id=name)
    until(lambda: len(starts(noting)) == 3, what="not all run")
    for _ in range(2):
        before = len(starts(noting))
        kill_all(supervised, noting)
        supervised = supervise(max_attempts=3, concurrency=4, visibility_timeout="1.1s", statement_timeout="1s")
        until(lambda before=before: len(starts(noting)) > before, what="no suspect runs")
    kill_all(supervised, noting)
    (noting / "go").touch()
    supervise(max_attempts=3, concurrency=4, visibility_timeout="1.1s", statement_timeout="1s")
    until_settled(db, 60)
    assert statuses(db) == {"COMPLETED": 3}
    lost = [verdict for name in names for _, verdict in verdicts(db, name) if verdict == "LOST"]
    assert len(lost) >= 5, "three at the first kill, and at least one at each of the others"


def test_suspects_run_one_at_a_time_in_processes_of_their_own(
    supervise: Supervise, noting: Path, bus: CommandBus, db: Db
) -> None:
    """With two workers under one supervisor: the kernel's lock keeps them apart."""
    names = [f"c{n}" for n in range(4)]
    supervised = supervise(processes=2, concurrency=2, max_attempts=1).until_ready(2)
    for name in names:
        bus.send("orders", "note", command_id=name)
    until(lambda: len(starts(noting)) == 4, what="not all run")
    kill_all(supervised, noting)
    again = supervise(processes=2, concurrency=2, max_attempts=1).until_ready(2)
    until(lambda: len(starts(noting)) == 5, what="no suspect runs")
    bus.send("orders", "quick", command_id="healthy")
    until(lambda: status_of(bus, "healthy") is CommandStatus.COMPLETED)
    until(lambda: one(db, "SELECT count(*) >= 5 FROM commandbus.attempt WHERE verdict = 'GIVEN_BACK'"))
    assert len(starts(noting)) == 5, "the others hold no slot, and come again"
    workers = set(again.workers())
    (noting / "go").touch()
    until_settled(db, 60)
    assert statuses(db) == {"COMPLETED": 5}
    later = starts(noting)[4:]
    assert [count for _, _, count in later] == [1] * 4
    assert not workers & {pid for _, pid, _ in later}, "in child processes"
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict NOT IN ('LOST', 'GIVEN_BACK')") == 0


def test_only_the_suspect_that_ran_is_charged_for_the_second_loss(
    supervise: Supervise, noting: Path, bus: CommandBus, db: Db
) -> None:
    names = [f"c{n}" for n in range(4)]
    supervised = supervise(concurrency=4)
    for name in names:
        bus.send("orders", "note", command_id=name)
    until(lambda: len(starts(noting)) == 4, what="not all run")
    kill_all(supervised, noting)
    supervised = supervise(concurrency=4)
    until(lambda: len(starts(noting)) == 5, what="no suspect runs")
    kill_all(supervised, noting)
    (unlucky, _, _) = starts(noting)[4]
    supervise(concurrency=4)
    until(lambda: (2, "LOST") in verdicts(db, unlucky) or (3, "LOST") in verdicts(db, unlucky))
    assert {name: charged(db, name) for name in names} == {name: int(name == unlucky) for name in names}


@pytest.mark.parametrize(("limit", "expected"), [(1, 2), (2, 3)])
def test_a_command_that_ends_the_whole_container_does_not_loop_for_ever(
    supervise: Supervise, noting: Path, bus: CommandBus, db: Db, limit: int, expected: int
) -> None:
    """The first loss is waived: it starts once more than its limit allows, and then a person must look."""
    bus.send("orders", "end_all", command_id="poison", max_attempts=limit)
    bus.send("orders", "note", command_id="healthy", max_attempts=1)
    (noting / "go").touch()
    for _ in range(expected):
        supervised = supervise()
        (noting / "writing").write_text(str(supervised.process.pid))
        (noting / "writing").rename(noting / "supervisor")
        supervised.process.wait(30)
        assert supervised.process.returncode == -signal.SIGKILL
    supervise()
    until(lambda: status_of(bus, "poison") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
    assert [name for name, _, _ in starts(noting)].count("poison") == expected
    until(lambda: status_of(bus, "healthy") is CommandStatus.COMPLETED)


def lost_in(supervised: Supervised) -> dict[str, float]:
    """What its metrics say of lost attempts, by command type."""
    families = text_string_to_metric_families(supervised.ask("/metrics")[1])
    (attempts,) = [family for family in families if family.name == "commandbus_attempts"]
    return {
        sample.labels["command_type"]: sample.value
        for sample in attempts.samples
        if sample.labels["outcome"] == "lost" and sample.value
    }


def kill_workers(supervised: Supervised) -> None:
    """kill -9 of idle workers; returns when others have taken their places."""
    gone = supervised.workers()
    for pid in gone:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(supervised.workers()) == len(gone) and not set(gone) & set(supervised.workers()))


PREFETCHED = 2000  # as many as a worker with quick handlers may hold


@pytest.mark.slow
def test_what_a_killed_worker_had_only_prefetched_is_through_within_seconds(
    supervise: Supervise, noting: Path, bus: CommandBus, db: Db
) -> None:
    """All of them are suspects, and run one at a time; of two workers one runs them."""
    bus.send_many("orders", [NewCommand("instant", command_id=f"c{n}") for n in range(PREFETCHED)])
    db.execute(
        "UPDATE pgmq.q_orders__commands SET read_ct = 1, vt = now(), "
        "headers = jsonb_build_object('held_by', 'gone', 'since', now())"
    )
    supervised = supervise(processes=2, concurrency=4)
    supervised.until_ready(2)
    until_settled(db, 20)
    assert statuses(db) == {"COMPLETED": PREFETCHED}
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'LOST'") == PREFETCHED
    assert lost_in(supervised) == {"instant": PREFETCHED}
    kill_workers(supervised)
    assert lost_in(supervised) == {"instant": PREFETCHED}, "the counts outlive the workers that counted"
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict NOT IN ('LOST', 'GIVEN_BACK')") == 0


def test_what_had_only_been_prefetched_beside_a_killed_supervisor_is_not_suspected(
    supervise: Supervise, noting: Path, bus: CommandBus, db: Db
) -> None:
    """Its successor on the same machine finds in shared memory what ran: two commands in two slots."""
    first = supervise(processes=1, concurrency=2)
    first.until_ready(1)
    bus.send_many("orders", [NewCommand("note", command_id=f"n{n}") for n in range(2)])
    until(lambda: len(starts(noting)) == 2)
    bus.send_many("orders", [NewCommand("instant", command_id=f"c{n}") for n in range(20)])
    (worker,) = {
        row[0] for row in db.execute("SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands").fetchall()
    } - {None}
    kill_all(first, noting)
    db.execute(  # as a worker with quick handlers would have had them
        "UPDATE pgmq.q_orders__commands SET read_ct = 1, vt = now(), "
        "headers = jsonb_build_object('held_by', %s::text, 'since', now())",
        (worker,),
    )
    (noting / "go").touch()
    second = supervise(processes=1, concurrency=2)
    second.until_ready(1)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 22}
    assert lost_in(second) == {"note": 2, "instant": 20}, "the successor counts what its predecessor lost"
    suspected = (
        "SELECT DISTINCT c.command_id FROM commandbus.attempt a JOIN commandbus.command c ON c.id = a.command "
        "WHERE a.verdict = 'LOST' AND a.error LIKE '%child process%' ORDER BY 1"
    )
    assert [row[0] for row in db.execute(suspected).fetchall()] == ["n0", "n1"]
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'LOST'") == 22


CLOSES_TURNS = '''
@handlers.handler("orders", "close_turns")
def close_turns(command, ctx):
    """Closes the file by which the supervisor's workers take turns, as a careless handler might."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if "commandbus-turn" in os.readlink(f"/proc/self/fd/{fd}"):
                os.close(fd)
        except OSError:
            continue
'''


def test_a_worker_that_cannot_take_turns_any_more_is_replaced(
    supervise: Supervise, tasks: Path, bus: CommandBus, db: Db
) -> None:
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + CLOSES_TURNS)
    supervised = supervise().until_ready()
    bus.send("orders", "close_turns", command_id="careless")
    supervised.until_said("has closed descriptors that are not its own")
    supervised.until_ready(2)
    with db.transaction():
        bus.send("orders", "quick", command_id="suspect", conn=db)
        db.execute("UPDATE commandbus.command SET suspect = 0, alone = true WHERE command_id = 'suspect'")
    until(lambda: status_of(bus, "suspect") is CommandStatus.COMPLETED)
