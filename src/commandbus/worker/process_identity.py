"""Which operating-system process this is, in text that another process can check: is it certainly dead?

    <boot id> <pid namespace> <pid> <start time>

A pid alone may belong to another process by now, and means something only in its own namespace and until the
machine is started again. So another machine, another container, or a machine that was restarted since cannot say
anything. `is_dead` is True only if this machine, since this boot and in this namespace, knows that it is gone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_known: dict[int, str | None] = {}  # by pid: a forked copy is another process


def identity() -> str | None:
    """The identity of this process; None if this system does not say it."""
    pid = os.getpid()
    if pid not in _known:
        _known.clear()
        _known[pid] = _read_identity(pid)
    return _known[pid]


def is_dead(told: str | None) -> bool | None:
    """Is the process with this identity dead? None: it cannot be told from here."""
    here = identity()
    if told is None or here is None or told.split()[:2] != here.split()[:2]:
        return None
    pid, start = told.split()[2:]
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user, so it exists
        return None
    return _is_another(int(pid), start)


def _is_another(pid: int, start: str) -> bool | None:
    fields = _stat(pid)
    if fields is None:
        return None  # another user's, or gone at this moment: the next attempt will know
    if fields[19] != start:
        return True
    return fields[0] in ("Z", "X") and _threads(pid) <= 1  # killed, and nobody has taken note yet


def _read_identity(pid: int) -> str | None:
    fields = _stat(pid)
    try:
        return None if fields is None else f"{_boot()} {os.readlink('/proc/self/ns/pid')} {pid} {fields[19]}"
    except OSError:
        return None


def _boot() -> str:
    return _BOOT.read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """The fields of `stat`, beginning with the state. (The name before it may contain anything.)"""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    except OSError:
        return None
    fields = text.decode("ascii", "replace").split()
    return fields if len(fields) > 19 else None


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
