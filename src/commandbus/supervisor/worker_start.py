"""What is known about a worker that is not ready yet: what it does, for how long, and at which line of code.

A slow start is reported after SLOW_SECONDS and then every AGAIN_SECONDS, with the current line of code. A starting
worker imports the user's modules, and a module that waits for something does not report that itself.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Final

from commandbus.model.crash_attribution import Dump

SLOW_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 60.0
DUMP_SECONDS: Final = 0.4
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+)')
_OURS: Final = str(Path(__file__).parents[1])
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Start:
    """Bookkeeping of one start; instants are of the caller's clock."""

    def __init__(self, now: float) -> None:
        self.place = ""
        self._began_at = now
        self._next_at = now + SLOW_SECONDS
        self._asked_at: float | None = None

    def wants_stacks(self, now: float) -> bool:
        """Is it time to ask for its stacks?"""
        if self._asked_at is not None or now < self._next_at:
            return False
        self._asked_at = now
        return True

    def is_due(self, now: float) -> bool:
        """Is it time to report? By now the worker has written the stacks that it was asked for a moment ago."""
        if self._asked_at is None or now < self._asked_at + DUMP_SECONDS:
            return False
        self._next_at, self._asked_at = self._asked_at + AGAIN_SECONDS, None
        return True

    def note(self, now: float, doing: str | None) -> str:
        """How long it has been starting, and what it does; empty while the start is not slow."""
        lasted = now - self._began_at
        if lasted < SLOW_SECONDS:
            return ""
        return f"has been starting for {lasted:.0f} s{described(doing, self.place)}"


def described(doing: str | None, place: str) -> str:
    """` (importing app), at app.py:3`, or as much of it as is known."""
    return f" ({doing or 'starting Python'})" + (f", at {place}" if place else "")


def place_of(stacks: Dump) -> str:
    """The innermost line outside of libraries, or else the innermost line; of the current thread, or else the
    main."""
    if not stacks.stacks:
        return ""
    main = list(stacks.stacks.values())[-1]
    stack = main if stacks.current is None else stacks.stacks.get(stacks.current, main)
    frames = [found for frame in stack if (found := _FRAME.match(frame))]
    real = [found for found in frames if not found["file"].startswith("<")]
    own = [found for found in real if not found["file"].startswith((*_LIBRARIES, _OURS))]
    chosen = next(iter(own or real or frames), None)
    return "" if chosen is None else f"{chosen['file']}:{chosen['line']}"
