"""on_start, on_stop and middleware in worker processes and their child processes, and what a kill does to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from commandbus import CommandBus
from commandbus.cli.exit_codes import ExitCode
from support.supervised import Supervised
from support.waiting import until

Supervise = Callable[..., Supervised]
MODULE = """
import os, time
from contextvars import ContextVar
from pathlib import Path
from commandbus import HandlerRegistry

handlers = HandlerRegistry()
trace = ContextVar("trace", default=None)

def note(event, state):
    with Path("life.log").open("a") as log:
        log.write(f"{event} {'child' if state.is_child else 'worker'} {os.getpid()}\\n")

@handlers.on_start
def start(state):
    if Path("refuse").exists():
        raise ConnectionRefusedError("no mail server")
    note("start", state)
    state.pid = os.getpid()

@handlers.lifespan
async def session(state):
    note("enter", state)
    yield
    note("leave", state)

@handlers.on_stop
def stop(state):
    note("stop", state)

@handlers.middleware
def traced(command, ctx):
    trace.set((command.headers or {}).get("trace"))
    result = yield
    return {**result, "wrapped": True}

def told(ctx):
    return {"trace": trace.get(), "own_state": ctx.state.pid == os.getpid(), "pid": os.getpid()}

@handlers.handler("orders", "thread")
def thread(command, ctx):
    return told(ctx)

@handlers.handler("orders", "process", isolation="process")
def process(command, ctx):
    return told(ctx)

@handlers.handler("orders", "process_async", isolation="process")
async def process_async(command, ctx):
    return told(ctx)

@handlers.handler("orders", "hold", timeout=0)
def hold(command, ctx):
    Path("held").write_text(str(os.getpid()))
    while not Path("go").exists():
        time.sleep(0.02)
    return told(ctx)
"""


@pytest.fixture
def module(tasks: Path) -> Path:
    (tasks / "lifespans.py").write_text(MODULE)
    return tasks


def life(folder: Path) -> list[tuple[str, str, int]]:
    """What was noted, in order: the event, the kind of process, its pid."""
    file = folder / "life.log"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(event, kind, int(pid)) for event, kind, pid in lines]


@pytest.mark.slow
def test_each_process_has_its_own_and_a_killed_worker_runs_no_stop(
    supervise: Supervise, module: Path, bus: CommandBus
) -> None:
    """A worker is killed in the middle of an attempt: its replacement starts anew, and runs the command again."""
    supervised = supervise(
        reference="lifespans:handlers", processes=2, concurrency=2, task_timeout="0"
    ).until_ready(2)
    for kind in ("thread", "process", "process_async"):
        found = bus.call("orders", kind, headers={"trace": kind}, wait=30)
        pid = found.pop("pid")
        assert found == {"trace": kind, "own_state": True, "wrapped": True}
        assert (pid in supervised.workers()) is (kind == "thread")
    held = bus.send("orders", "hold")
    until(lambda: (module / "held").exists() and (module / "held").read_text())
    victim = int((module / "held").read_text())
    os.kill(victim, signal.SIGKILL)
    (module / "go").touch()
    assert held.wait(30)["own_state"]
    supervised.until_ready(3)  # one that is still starting would have nothing to stop
    assert len({pid for event, kind, pid in life(module) if (event, kind) == ("start", "worker")}) == 3
    until(lambda: len(supervised.workers()) == 2)
    code, _ = supervised.stop()
    assert code == ExitCode.OK
    events = life(module)
    assert [event for event, _, pid in events if pid == victim] == ["start", "enter"]
    for pid in {pid for _, kind, pid in events if kind == "worker"} - {victim}:
        assert [event for event, _, each in events if each == pid] == ["start", "enter", "stop", "leave"]
    children = {pid for _, kind, pid in events if kind == "child"}
    assert children
    assert any([event for event, _, each in events if each == pid][-2:] == ["stop", "leave"] for pid in children)


@pytest.mark.slow
def test_a_failing_start_ends_the_supervisor_at_first_and_backs_off_later(
    supervise: Supervise, module: Path, bus: CommandBus
) -> None:
    (module / "refuse").touch()
    refused = supervise(reference="lifespans:handlers")
    code, _ = refused.end()
    assert code == ExitCode.CONFIGURATION
    assert "on_start lifespans.start failed at" in refused.log
    assert "ConnectionRefusedError: no mail server" in refused.log
    assert life(module) == []
    (module / "refuse").unlink()
    supervised = supervise(reference="lifespans:handlers").until_ready()
    (worker,) = supervised.workers()
    (module / "refuse").touch()
    os.kill(worker, signal.SIGKILL)
    supervised.until_said("workers are still failing", 30)
    assert supervised.log.count("on_start lifespans.start failed at") <= 6, "it backs off"
    (module / "refuse").unlink()
    sent = bus.send("orders", "thread")
    assert sent.wait(60)["own_state"]
    assert supervised.stop()[0] == ExitCode.OK


def test_a_child_process_whose_start_fails_is_told_in_the_history(
    supervise: Supervise, module: Path, bus: CommandBus
) -> None:
    source = MODULE.replace('if Path("refuse").exists():', "if state.is_child:")
    (module / "lifespans.py").write_text(source)
    supervise(reference="lifespans:handlers").until_ready()
    sent = bus.send("orders", "process", max_attempts=1)
    outcome = bus.wait_all([sent], wait=30)[0]
    assert outcome.status == "IN_TROUBLESHOOTING_QUEUE"
    assert "on_start lifespans.start failed" in str(outcome.error)
    assert "no mail server" in str(outcome.error)
