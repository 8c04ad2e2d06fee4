"""Apart: who runs alone, and the file by whose lock the workers of a supervisor take turns."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from commandbus import HandlerRegistry
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.isolation.quarantine import Quarantine

NOW = datetime.now(UTC)
LOCK = """
import fcntl, struct, sys, time
file = open(sys.argv[1], "r+b", buffering=0)
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(struct.pack("d", time.monotonic() + 100))
print(flush=True)
sys.stdin.read()
"""
TRY = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@pytest.fixture
def turn() -> Iterator[int]:
    """The file, as a supervisor makes it."""
    made = os.memfd_create("turn")
    yield made
    os.close(made)


def suspect(msg_id: int) -> ClaimedRow:
    """A command that was lost without a verdict."""
    return ClaimedRow(
        msg_id, 2, msg_id, f"c{msg_id}", "work", None, 0, 1, None, None, None, None, NOW, None, None, None,
        NOW, NOW, suspect=1, alone=True,
    )  # fmt: skip


def entered(apart: Quarantine, row: ClaimedRow) -> Attempt:
    attempt = Attempt("orders", tuple(row), None, 0.0)
    apart.enter(attempt)
    apart.admitted()
    return attempt


def is_locked(path: Path) -> bool:
    """Can another process not lock it?"""
    command = [sys.executable, "-c", TRY, str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.fixture
def called() -> list[Attempt]:
    """The suspects whose turn has come."""
    return []


@pytest.fixture
def apart(turn: int, called: list[Attempt]) -> Quarantine:
    return Quarantine(HandlerRegistry(), turn=turn, processes=lambda: 2, on_turn=called.append)


def test_one_suspect_at_a_time_and_the_end_of_one_calls_the_next(
    apart: Quarantine, turn: int, called: list[Attempt]
) -> None:
    shared = Path(f"/proc/{os.getpid()}/fd/{turn}")
    assert (apart.room("orders", [suspect(1), suspect(2)]).alone or 0) >= 2
    first = entered(apart, suspect(1))
    second = entered(apart, suspect(2))
    assert is_locked(shared), "the other workers of the supervisor wait"
    assert called == [first]
    apart.leave(first)
    assert called == [first, second]
    assert is_locked(shared)
    apart.leave(second)
    assert not is_locked(shared)


def test_while_another_worker_has_the_turn_no_suspect_waits_here(apart: Quarantine, turn: int) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", LOCK, f"/proc/{os.getpid()}/fd/{turn}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        room = apart.room("orders", [suspect(1)])
        assert (room.alone, room.soonest > 90) == (0, True), "the other one's line is long"
        other.communicate()
    assert (apart.room("orders", [suspect(1)]).alone or 0) > 0


def test_the_line_is_as_long_as_the_suspects_are_quick(apart: Quarantine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("commandbus.worker.isolation.quarantine.monotonic", lambda: now)

    def room() -> int:
        return apart.room("orders", [suspect(99)]).alone or 0

    room()
    for n in range(50):
        quick = entered(apart, suspect(n))
        now += 0.004
        apart.leave(quick)
    assert 900 < room() <= 1000, "as many as start within four seconds"
    slow, waits = entered(apart, suspect(1)), entered(apart, suspect(2))
    now += 3.0
    assert apart.take_back_late() == []
    assert room() == 0, "one runs, and one waits: that is enough"
    now += 1.5
    assert apart.take_back_late() == [waits], "others may run it"
    apart.leave(waits)
    apart.leave(slow)
    for n in range(20):
        slow = entered(apart, suspect(n))
        now += 60.0
        apart.leave(slow)
    assert room() == 1, "nobody waits behind a slow one"


def test_those_that_wait_for_their_turn_are_given_back_at_the_end(
    apart: Quarantine, called: list[Attempt]
) -> None:
    apart.room("orders", [suspect(1), suspect(2)])
    first, second = entered(apart, suspect(1)), entered(apart, suspect(2))
    assert apart.take_back() == [second]
    apart.leave(second)
    apart.leave(first)
    assert called == [first]


def test_a_turn_that_nobody_used_is_given_back(apart: Quarantine, turn: int) -> None:
    assert (apart.room("orders", [suspect(1)]).alone or 0) > 0
    apart.admitted()
    assert not is_locked(Path(f"/proc/{os.getpid()}/fd/{turn}"))


def test_the_locks_of_a_stranger_who_has_its_number_are_left_alone(
    apart: Quarantine, turn: int, tmp_path: Path
) -> None:
    """A handler has closed the file of the turns, and opened one of its own, which it has locked."""
    assert (apart.room("orders", [suspect(1)]).alone or 0) > 0
    running = entered(apart, suspect(1))
    stranger = tmp_path / "stranger"
    stranger.touch()
    other = os.open(stranger, os.O_RDWR)
    os.dup2(other, turn)
    os.close(other)
    fcntl.lockf(turn, fcntl.LOCK_EX)
    assert apart.is_turn_lost
    apart.leave(running)
    assert is_locked(stranger)
    assert apart.room("orders", [suspect(2)]).alone == 0, "this worker drains; another one runs it"
    apart.admitted()
    assert is_locked(stranger)
