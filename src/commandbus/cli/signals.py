"""Signals as exceptions: SIGTERM (and SIGHUP, unless it is ignored) ends a command as Ctrl-C does, through every
`finally`, so that an embedded server or a child process is not left behind.

`deferred()` is for the few lines that must not be interrupted, such as starting a process and noting its id. A
signal that comes during these lines is raised at the end of the block.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGTERM, signal.SIGHUP)


class TerminatedError(BaseException):
    """SIGTERM or SIGHUP; not an Exception, so that no `except Exception` on the way to the entry catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _raise(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the shape of a signal handler
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise TerminatedError(number)


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Raise the signals as exceptions within the block. Outside the main thread, this changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in CAUGHT:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            before[number] = signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred(*, forget: bool = False) -> Iterator[None]:
    """Hold signals back until the end of the block. With `forget`, drop them, because we are cleaning up
    already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        seen.append(number)

    before = {
        number: signal.signal(number, note)
        for number in (*CAUGHT, signal.SIGINT)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if seen and not forget:
        _raise(seen[0], None)
