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
from commandbus.flow.claim import ClaimedRow
from commandbus.runtime.apart import Apart
from commandbus.runtime.attempt import Attempt

NOW = datetime.now(UTC)
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


def entered(apart: Apart, row: ClaimedRow) -> Attempt:
    attempt = Attempt("orders", tuple(row), None, 0.0)
    apart.enter(attempt)
    apart.admitted()
    return attempt


def is_locked(path: Path) -> bool:
    """Can another process not lock it?"""
    command = [sys.executable, "-c", TRY, str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_one_suspect_at_a_time(turn: int) -> None:
    apart = Apart(HandlerRegistry(), turn=turn, processes=2)
    shared = Path(f"/proc/{os.getpid()}/fd/{turn}")
    assert apart.room("orders", [suspect(1), suspect(2)]).alone == 1
    first = entered(apart, suspect(1))
    assert is_locked(shared), "the other workers of the supervisor wait"
    assert apart.room("orders", [suspect(2)]).alone == 0
    apart.admitted()
    apart.leave(first)
    assert not is_locked(shared)
    assert apart.room("orders", [suspect(2)]).alone == 1


def test_a_turn_that_nobody_used_is_given_back(turn: int) -> None:
    apart = Apart(HandlerRegistry(), turn=turn, processes=2)
    assert apart.room("orders", [suspect(1)]).alone == 1
    apart.admitted()
    assert not is_locked(Path(f"/proc/{os.getpid()}/fd/{turn}"))


def test_the_locks_of_a_stranger_who_has_its_number_are_left_alone(turn: int, tmp_path: Path) -> None:
    """A handler has closed the file of the turns, and opened one of its own, which it has locked."""
    apart = Apart(HandlerRegistry(), turn=turn, processes=2)
    assert apart.room("orders", [suspect(1)]).alone == 1
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
