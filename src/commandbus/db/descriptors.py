"""Descriptors that somebody else in this process may close: a handler's `os.closerange(3, 256)` closes ours, too.

The number of a closed descriptor is soon used for another file. Writing to it then writes to that file, and
closing it closes that file. So each of our long-lived descriptors is remembered with the
file behind it (device and inode), and looked at before it is used. A look is one system call.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TypeAlias

FileId: TypeAlias = "tuple[int, int] | None"


def file_behind(descriptor: int) -> FileId:
    """Which file it is; None if it is none."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class WakeFile:
    """A pipe by which other threads wake a poll. One that somebody closed is made anew.

    It is not an eventfd: all of them have the same inode, so one could not be told from another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.times_lost = 0
        self._make()

    def _make(self) -> None:
        self._ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._file = file_behind(self._ends[0])

    def _is_ours(self, end: int) -> bool:
        return file_behind(self._ends[end]) == self._file

    def _end(self, end: int) -> int:
        if not self._is_ours(end):
            with self._lock:
                if not self._is_ours(end):
                    self.times_lost += 1
                    self.close()
                    self._make()
        return self._ends[end]

    def descriptor(self) -> int:
        """What to poll."""
        return self._end(0)

    def write(self) -> None:
        """Wake the poller. A poller of a closed file notices by itself that it must poll the new one."""
        with contextlib.suppress(OSError):  # the pipe is full, so the poller is awake
            os.write(self._end(1), b"!")

    def take(self) -> None:
        """Read what was written, so that the descriptor is quiet again."""
        with contextlib.suppress(OSError):
            while len(os.read(self._end(0), 4096)) == 4096:
                pass

    def close(self) -> None:
        """Close its descriptors, if they are still ours."""
        for end in (0, 1):
            if self._is_ours(end):
                os.close(self._ends[end])
