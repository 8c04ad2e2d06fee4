"""isolation="process": how many child processes there are, how they are found, started and ended."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, ConfigurationError, HandlerRegistry, Worker
from commandbus.worker.execution.handlers import HandlerRegistry as Registry
from commandbus.worker.registry_address import find_address
from support.isolated_handlers import handlers
from support.isolating import Lab, MakeLab
from support.waiting import Stopwatch, until, until_settled
from support.workers import quick_settings


def children() -> set[int]:
    """Of this process, zombies included."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except FileNotFoundError:
            continue
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_one_is_warm_before_the_first_attempt(make_lab: MakeLab) -> None:
    lab = make_lab()
    (pid,) = until(lab.isolation.pids)
    assert lab.result("echo")["pid"] == pid


def test_there_are_never_more_than_slots(make_lab: MakeLab) -> None:
    lab = make_lab(concurrency=3)
    running = [lab.start("hang", {"how": "sleep"}) for _ in range(3)]
    until(lambda: all(one.attempt.child is not None and one.attempt.child.has_begun for one in running))
    assert len(lab.isolation.pids()) == 3
    for one in running:
        one.ask_to_stop(grace=0.1)
        one.kill()
    until(lambda: len(lab.isolation.pids()) == 1)  # one is kept warm


def test_a_registry_that_asks_for_nothing_starts_nothing(
    bus: CommandBus, db: psycopg.Connection[Any], database: str
) -> None:
    lab = Lab(bus, db, quick_settings(database), HandlerRegistry())
    lab.isolation.start()
    assert not lab.isolation.is_available
    assert lab.isolation.pids() == []
    lab.isolation.close(1)


def test_nothing_is_left_after_twenty_rounds(make_lab: MakeLab) -> None:
    before_children = children()
    lab = make_lab(concurrency=2)
    lab.result("echo")
    before = None
    for turn in range(20):
        attempt = lab.claim("die", {"how": ("exit", "kill", "segv")[turn % 3]})
        lab.run(attempt)
        lab.result("echo")
        if turn == 2:
            before = _files_at_rest(lab)
    assert before is not None
    assert _files_at_rest(lab) <= before
    lab.isolation.close(3)
    assert children() == before_children


def _files_at_rest(lab: Lab) -> int:
    """With the spare child in place."""
    lab.result("echo")
    until(
        lambda: (
            len(lab.isolation._children._idle) == len(lab.isolation.pids())
            and lab.isolation._children._ahead is None
        )
    )
    return open_files() - 4 * len(lab.isolation.pids())


def test_opening_and_closing_leaves_nothing(bus: CommandBus, db: psycopg.Connection[Any], database: str) -> None:
    before_children, before_files = children(), open_files()
    for _ in range(5):
        lab = Lab(bus, db, quick_settings(database), handlers)
        lab.isolation.start()
        lab.isolation.close(3)
    assert children() == before_children
    del lab
    gc.collect()  # the wake file of a service that was never started is closed with its object
    until(lambda: open_files() <= before_files)  # an earlier test's may have been closed since


def test_close_kills_what_still_runs(make_lab: MakeLab) -> None:
    lab = make_lab()
    running = lab.start("hang", {"how": "spin"})
    until(lambda: running.attempt.child is not None and running.attempt.child.has_begun)
    stopwatch = Stopwatch()
    lab.isolation.close(5)
    assert stopwatch.seconds(waits=1.0) < 4
    assert lab.isolation.pids() == []
    assert running.settled() is None
    assert lab.last(running.attempt).verdict == "WAIVED"
    assert lab.isolation.take(lab.claim("echo")) is None  # to be given back


def test_a_local_registry_is_refused_at_start_with_the_remedy(
    bus: CommandBus, db: psycopg.Connection[Any], database: str
) -> None:
    registry = HandlerRegistry()

    @registry.handler("orders", "risky", isolation="process")
    def risky(ctx: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"risky: a process of its own could not find it.*module-level"):
        Lab(bus, db, quick_settings(database), registry)


def test_an_address_is_the_defining_module() -> None:
    found = find_address(handlers, None)
    assert found is not None
    assert (found.module, found.name) == ("support.isolated_handlers", "handlers")
    named = find_address(handlers, "support.isolated_handlers:handlers")
    assert named is not None
    assert (named.module, named.name) == ("support.isolated_handlers", "handlers")
    assert find_address(Registry(), "support.isolated_handlers:handlers") is None


class Noting(ModuleType):
    """A module that notes whether somebody looks for a registry in it."""

    is_seen = False

    def __getattribute__(self, name: str) -> Any:
        if name == "__spec__":
            ModuleType.__setattr__(self, "is_seen", True)
        return ModuleType.__getattribute__(self, name)


def test_the_address_is_looked_for_when_a_command_needs_a_child_process(
    bus: CommandBus, db: psycopg.Connection[Any], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large application has thousands of modules to look through, and most workers never need one."""
    registry = HandlerRegistry()
    registry.register("orders", "plain", lambda command, ctx: None)
    noting = Noting("noting")
    monkeypatch.setitem(sys.modules, "noting", noting)
    with Worker(registry, settings=quick_settings(database)):
        bus.send("orders", "plain", {})
        until_settled(db)
    assert not noting.is_seen
    assert find_address(registry, None) is None
    assert noting.is_seen


# --- whole programs ---------------------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, time, threading
    from commandbus import CommandBus, HandlerRegistry, Worker
    {head}
    @handlers.handler("orders", "pid", isolation="process")
    def pid(command, ctx):
        return [os.getpid(), __name__]

    def main():
        url = sys.argv[1]
        with CommandBus(url) as bus, Worker(handlers, database_url=url) as worker:
            sent = bus.send("orders", "pid")
            attempts = []
            while (record := bus.get_command("orders", sent.command_id)).status != "COMPLETED" and not attempts:
                attempts = bus.get_attempts("orders", sent.command_id)
                time.sleep(0.01)
            print(record.status, os.getpid(), record.result, [one.error for one in attempts], flush=True)
            {tail}
    {call}
"""
GUARDED = 'if __name__ == "__main__":\n        main()'


def run_program(folder: Path, database: str, *start: str, **parts: str) -> subprocess.CompletedProcess[str]:
    parts = {"head": "handlers = HandlerRegistry()", "tail": "", "call": GUARDED} | parts
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM.format(**parts)))
    command = [sys.executable, *(start or ("program.py",)), database]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("start", [("program.py",), ("-m", "program")])
def test_the_registry_of_a_script_is_found(bus: CommandBus, database: str, folder: Path, start: Any) -> None:
    ended = run_program(folder, database, *start)
    assert ended.stdout.startswith("COMPLETED"), ended
    assert "__commandbus_main__" in ended.stdout


def test_handlers_that_a_script_adds_to_another_modules_registry_are_found(
    bus: CommandBus, database: str, folder: Path
) -> None:
    (folder / "registry.py").write_text("from commandbus import HandlerRegistry\nhandlers = HandlerRegistry()\n")
    ended = run_program(folder, database, head="from registry import handlers")
    assert ended.stdout.startswith("COMPLETED"), ended
    assert "__commandbus_main__" in ended.stdout


def test_a_script_without_a_guard_is_told(bus: CommandBus, database: str, folder: Path) -> None:
    ended = run_program(folder, database, call="main()")
    assert "loading its module starts a worker: put that below" in ended.stdout, ended


def test_a_module_that_fails_in_the_child_is_told(bus: CommandBus, database: str, folder: Path) -> None:
    head = """handlers = HandlerRegistry()
    if __name__ != "__main__":
        raise RuntimeError("not here")
    """
    ended = run_program(folder, database, head=head)
    assert "its process could not start: " in ended.stdout, ended
    assert "RuntimeError: not here" in ended.stdout


def test_children_die_with_a_killed_worker(bus: CommandBus, database: str, folder: Path) -> None:
    parts = {"head": "handlers = HandlerRegistry()", "tail": "time.sleep(1000)", "call": GUARDED}
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM.format(**parts)))
    program = subprocess.Popen(
        [sys.executable, "program.py", database], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None
        status, _, child = program.stdout.readline().split()[:3]
        pid = int(child.strip("[,"))
        assert status == "COMPLETED"
        assert not is_gone(pid)
    finally:
        program.send_signal(signal.SIGKILL)
        program.communicate()
    until(lambda: is_gone(pid))


def test_an_interpreter_that_does_not_start_is_told(make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    lab = make_lab()
    attempt = lab.claim("echo")
    lab.settle(attempt, lab.run(attempt))
    said = lab.last(attempt)
    assert (said.error_type, said.error_code, said.verdict) == ("IsolationFailed", "ISOLATION_FAILED", "RETRY")
    assert "its process could not start: it ended with exit code 1" in said.error
    assert "Python path configuration" in said.error or "Fatal Python error" in said.error


def test_a_process_that_cannot_be_made_is_told(make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    lab = make_lab()
    attempt = lab.claim("echo")
    lab.settle(attempt, lab.run(attempt))
    assert "could not be started: FileNotFoundError" in lab.last(attempt).error
