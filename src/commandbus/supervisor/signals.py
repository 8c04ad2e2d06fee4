"""The supervisor's signals. A signal handler only notes the signal, and wakes the loop through a socket."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """The received signals, in order. `socket` becomes readable when a signal comes. `ignored` signals never
    come."""

    def __init__(self) -> None:
        self.socket, self._theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._theirs.setblocking(False)
        self.ignored: set[signal.Signals] = set()
        self._come: list[int] = []
        self._has_terminal = terminal_answers()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Receive signals within the block. Signals that were ignored before stay ignored (nohup relies on
        that)."""

        def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the shape of a signal handler
            self._come.append(number)

        before: dict[int, Any] = {}
        wakeup = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        try:
            for number in CAUGHT:
                if signal.getsignal(number) is signal.SIG_IGN:
                    self.ignored.add(number)
                else:
                    before[number] = signal.signal(number, note)
            yield
        finally:
            for caught, handler in before.items():
                signal.signal(caught, handler)
            signal.set_wakeup_fd(wakeup)

    def take(self) -> list[signal.Signals]:
        """The signals that have come since the last call."""
        try:
            while self.socket.recv(4096):
                pass
        except BlockingIOError:
            pass
        come, self._come = self._come, []
        return [signal.Signals(number) for number in come]

    def asks_for_reload(self, number: signal.Signals) -> bool:
        """SIGHUP asks for a reload, unless it came because the terminal was closed: then the supervisor stops."""
        return number == signal.SIGHUP and not (self._has_terminal and not terminal_answers())

    def close(self) -> None:
        """Close the sockets."""
        self.socket.close()
        self._theirs.close()


def terminal_answers() -> bool:
    """Is there a controlling terminal?"""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
