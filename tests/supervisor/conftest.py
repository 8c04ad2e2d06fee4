"""Supervisors of the test's own, with handlers written to a folder: `supervise(processes=2, …)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commandbus import CommandBus
from support.supervised import SOURCES, Supervised

TASKS = '''
import asyncio, ctypes, os, re, signal, time
from pathlib import Path
from commandbus import HandlerRegistry, RetryPolicy

handlers = HandlerRegistry()
VERSION = 1

@handlers.handler("orders", "quick")
def quick(command, ctx):
    time.sleep(0.05)
    return VERSION

@handlers.handler("orders", "hold", timeout=0)
def hold(command, ctx):
    """Runs until a file appears."""
    Path(command.command_id + ".started").write_text(str(os.getpid()))
    while not Path("go").exists():
        time.sleep(0.02)
    return ctx.attempt_number

@handlers.handler("orders", "hold_with_deadline", timeout=60)
def hold_with_deadline(command, ctx):
    return hold(command, ctx)

@handlers.handler("orders", "hold_async", timeout=0)
async def hold_async(command, ctx):
    Path(command.command_id + ".started").write_text(str(os.getpid()))
    while not Path("go").exists():
        await asyncio.sleep(0.02)
    return ctx.attempt_number

@handlers.handler("orders", "segfault")
def segfault(command, ctx):
    ctypes.string_at(0)

@handlers.handler("orders", "exit")
def exit_(command, ctx):
    os._exit(1)

@handlers.handler("orders", "regex")
def regex(command, ctx):
    re.match(r"(a+)+$", "a" * 40 + "b")

@handlers.handler("orders", "freeze")
def freeze(command, ctx):
    """Lets no other thread run, without computing: this call keeps the GIL."""
    Path(command.command_id + ".started").write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(1000)

@handlers.handler("orders", "sleep")
def sleep(command, ctx):
    Path(command.command_id + ".started").write_text(str(os.getpid()))
    time.sleep(1000)

@handlers.handler("orders", "forks")
def forks(command, ctx):
    forked = os.fork()
    if forked == 0:
        time.sleep(1000)
        os._exit(0)
    Path(command.command_id + ".forked").write_text(str(forked))
    os.kill(os.getpid(), signal.SIGKILL)

@handlers.handler("orders", "kill_me")
def kill_me(command, ctx):
    os.kill(os.getpid(), signal.SIGKILL)
'''

Supervise = Callable[..., Supervised]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with `tasks.py`."""
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


@pytest.fixture
def impatient(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Shortens limits of the supervisors that are started from now on:
    `impatient("worker_processes.DRAIN_SECONDS = 1.0")`."""

    def shorten(assignments: str) -> None:
        (tasks / "early").mkdir()
        (tasks / "early" / "sitecustomize.py").write_text(
            "import sys\n"
            "if 'commandbus.worker' in sys.orig_argv:\n"
            "    from commandbus.supervisor import restart_budget, worker_processes, worker_start\n"
            f"    {assignments}\n"
        )
        monkeypatch.setattr("support.supervised.SOURCES", f"{tasks / 'early'}:{SOURCES}")

    return shorten


@pytest.fixture
def has_orders() -> str:
    """`bus` has it."""
    return "bus"


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        bus.create_domain("orders")
        yield bus


@pytest.fixture
def supervise(tasks: Path, database: str, bus: CommandBus) -> Iterator[Supervise]:
    """Starts supervisors; none outlives the test, nor does anything that it started."""
    started: list[Supervised] = []

    def start(**options: Any) -> Supervised:
        supervised = Supervised(tasks, database, **options)
        started.append(supervised)
        return supervised

    yield start
    for supervised in started:
        supervised.clear_away()
