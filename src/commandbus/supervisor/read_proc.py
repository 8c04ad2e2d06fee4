"""What /proc says about a process. For a process that is gone: empty, zero or None."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def thread_cpu(pid: int) -> dict[int, float]:
    """CPU seconds of each thread so far, by native id."""
    found = {}
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return {}
    for thread in threads:
        if (fields := _stat(thread)) is not None:
            found[int(thread.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def cpu_since(before: dict[int, float], now: dict[int, float]) -> dict[int, float]:
    """The CPU seconds that each thread has used since, rounded as the kernel counts."""
    return {thread: max(0.0, seconds - before.get(thread, 0.0)) for thread, seconds in now.items()}


def is_stopped(pid: int) -> bool:
    """Was the process stopped, by SIGSTOP or a debugger?"""
    fields = _stat(Path(f"/proc/{pid}"))
    return fields is not None and fields[0] in ("T", "t")


def _stat(folder: Path) -> list[str] | None:
    """The fields of `stat`, beginning with the state. (A thread's name may contain any bytes, even spaces,
    brackets.)"""
    try:
        return (folder / "stat").read_bytes().rpartition(b")")[2].decode("ascii", "replace").split()
    except OSError:
        return None
