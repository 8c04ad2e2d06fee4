"""The two file locks of an embedded server: who may start or stop it, and who uses it.

Duty: flock, which the kernel releases when its process dies in whatever way. A flock belongs to an open file,
so that two objects, or two threads, in one process exclude and count each other as two processes do.

Invariant: descriptors are close-on-exec. A server that inherited one would hold the lock while it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from commandbus.clock import monotonic
from commandbus.errors import EmbeddedPostgresError

_TICK_SECONDS = 0.02


def open_lock_file(path: Path) -> int:
    # Read-only is enough for flock, and lets a plain user lock a file that root has made.
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def try_exclusive(descriptor: int) -> bool:
    """A shared lock that the descriptor held is given up, also if this fails."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def share(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_SH)


@contextlib.contextmanager
def exclusively(file: Path, *, limit_seconds: float) -> Iterator[None]:
    """Hold the file's lock. Waits for a limited time: the holder may be suspended (Ctrl-Z)."""
    descriptor = open_lock_file(file)
    try:
        give_up_at = monotonic() + limit_seconds
        while not try_exclusive(descriptor):
            if monotonic() >= give_up_at:
                raise EmbeddedPostgresError(
                    f"another process has held {file} for {limit_seconds:g} s: "
                    f"find it with `fuser {file}`, end it and try again"
                )
            time.sleep(_TICK_SECONDS)
        yield
    finally:
        os.close(descriptor)
