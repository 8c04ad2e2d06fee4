"""The programs that a child process has started, wherever they are. They are ended when the child has died.

A process may leave its group and its session, and its parent may end before it (`setsid` and two forks). Then
neither identifies it any more. Two things still do:

- A child process adopts the orphans below it (PR_SET_CHILD_SUBREAPER). While it lives, all of them are below it in
  the tree of parents.
- They inherit a mark in their environment, `<fleet>/<worker>/<token>/<number>/`. It names them after its end.

A process that clears its environment and outlives a child that died by itself is not found: isolation protects
against faults, not against attacks. A process with neither of the two is never touched.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

MARK: Final = "COMMANDBUS_ISOLATED"
_ROUNDS: Final = 20  # they may fork while they are counted
_ROUND_SECONDS: Final = 0.01
_STATE, _PARENT, _BEGAN = 0, 1, 19  # fields of /proc/…/stat, from the state on
_DEAD: Final = ("Z", "X")
_MOST_ZOMBIES: Final = 1000


def kill_below(pid: int) -> int:
    """End all descendants of a process, but not the process itself, which must be stopped. Returns how many."""
    return _kill_all(lambda: _below(pid))


def kill_marked(prefix: str) -> int:
    """End all whose mark begins with this. Returns how many there were."""
    wanted = f"{MARK}={prefix}".encode()
    return _kill_all(lambda: [pid for pid in _processes() if _is_marked(pid, wanted)])


def _kill_all(find: Callable[[], list[int]]) -> int:
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        before = _began()
        found = [pid for pid in find() if pid in before and pid != os.getpid()]
        if not found:
            break
        for pid in found:
            _kill(pid, before[pid])
        killed.update(found)
        time.sleep(_ROUND_SECONDS)
    return len(killed)


def _kill(pid: int, began: str) -> None:
    """Kill the process with this number if it began then; another process may have got the number since."""
    with suppress(OSError):
        it = os.pidfd_open(pid)
        try:
            if _stat(pid)[_BEGAN] == began:
                signal.pidfd_send_signal(it, signal.SIGKILL)
        finally:
            os.close(it)


def _began() -> dict[int, str]:
    """When each of our user's processes began, by its number."""
    return {pid: _stat(pid)[_BEGAN] for pid in _processes()}


def _processes() -> list[int]:
    """Those of our own user."""
    user, found = os.geteuid(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == user:
                    found.append(int(entry.name))
    return found


def _below(pid: int) -> list[int]:
    """The living descendants of a process, by their parents."""
    children: dict[int, list[int]] = {}
    for one in _processes():
        fields = _stat(one)
        if fields[_STATE] not in _DEAD:
            children.setdefault(int(fields[_PARENT]), []).append(one)
    found, looked = [], [pid]
    while looked:
        more = children.pop(looked.pop(), [])
        found += more
        looked += more
    return found


def _stat(pid: int) -> list[str]:
    """The fields of `stat` from the state on; of a process that is gone, those of a dead one without a parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["X", "0", *([""] * _BEGAN)]


def _is_marked(pid: int, wanted: bytes) -> bool:
    """A dead process has no environment."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return environment.startswith(wanted) or b"\0" + wanted in environment


def reap_adopted() -> int:
    """In a child, between two attempts: bury the orphans that it has adopted. Returns how many.

    A process that belongs to a `Popen` object is left to that.
    """
    reaped = 0
    for _ in range(_MOST_ZOMBIES):
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if dead is None or dead.si_pid in _awaited():
            break
        with suppress(ChildProcessError):
            os.waitpid(dead.si_pid, 0)
            reaped += 1
    return reaped


def _awaited() -> set[int]:
    """Processes that code here may still wait for. This takes a while, so it is called only if one is dead."""
    return {getattr(one, "pid", 0) for one in gc.get_objects() if _stands_for_a_process(type(one))}


def _stands_for_a_process(kind: type) -> bool:
    return issubclass(kind, subprocess.Popen) or str(kind.__module__).startswith("multiprocessing.popen_")
