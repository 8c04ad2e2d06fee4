"""What isolated attempts have started and left behind ends with the fleet, and with a worker that was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from commandbus import CommandBus, CommandStatus
from support.supervised import Supervised
from support.waiting import until

Supervise = Callable[..., Supervised]
DAEMONS = '''

@handlers.handler("orders", "daemonize", isolation="process", timeout=30)
def daemonize(command, ctx):
    """A process in a session of its own, whose parent has ended."""
    import subprocess
    if (first := os.fork()) == 0:
        os.setsid()
        sleeper = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
        Path("left.new").write_text(str(sleeper.pid))
        Path("left.new").rename("left")
        os._exit(0)
    os.waitpid(first, 0)
    while command.data == "stay":
        time.sleep(0.1)
'''


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def daemons(tasks: Path) -> Path:
    """The folder in which `left` names who was left behind."""
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + DAEMONS)
    return tasks


def test_at_the_end_of_the_fleet(supervise: Supervise, bus: CommandBus, daemons: Path) -> None:
    supervised = supervise().until_ready()
    bus.send("orders", "daemonize", command_id="a")
    until(lambda: is_completed(bus, "a"), what=lambda: supervised.log)
    left = int((daemons / "left").read_text())
    assert is_alive(left), "its attempt completed: it may be wanted"
    code, _ = supervised.stop()
    assert code == 0, supervised.log
    until(lambda: not is_alive(left))


def test_when_its_worker_is_killed(supervise: Supervise, bus: CommandBus, daemons: Path) -> None:
    supervised = supervise().until_ready()
    (worker,) = supervised.workers()
    bus.send("orders", "daemonize", "stay", command_id="a", max_attempts=1)
    left = int(until(lambda: (daemons / "left").exists() and (daemons / "left").read_text()))
    assert is_alive(left)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not is_alive(left), what=lambda: supervised.log)


def is_completed(bus: CommandBus, command_id: str) -> bool:
    found = bus.get_command("orders", command_id)
    return found is not None and found.status is CommandStatus.COMPLETED
