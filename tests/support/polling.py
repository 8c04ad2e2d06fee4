"""Which sockets or files can be read.

Unlike `select`, it takes descriptors of any number: a test worker may have more than 1,024 open.
"""

from __future__ import annotations

import select
from typing import Protocol, TypeVar


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


F = TypeVar("F", bound="int | _HasDescriptor")


def readable(files: list[F], seconds: float) -> list[F]:
    """Those that have something to read, or have ended; waits so long for the first."""
    looking, by_number = select.poll(), {}
    for file in files:
        number = file if isinstance(file, int) else file.fileno()
        by_number[number] = file
        looking.register(number, select.POLLIN)
    return [by_number[number] for number, _ in looking.poll(seconds * 1000)]
