"""Notices that an embedded server died under its user, and has it started again.

Duty: one thread per user of a server. It waits for the end of the server's process (a pidfd: that costs nothing
and is noticed at once; where there is none it looks once a second).

    waits for its end ──killed──▶ revive, again and again until it runs ──▶ waits for its end
            │
            └──stopped on purpose──▶ looks once a second whether somebody has started it again

Whether it was killed or stopped is for `server.py` to say, under the start lock: of several users only one
starts it, and nobody does after a stop.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from commandbus.db.embedded.postmaster import Postmaster
from commandbus.errors import EmbeddedPostgresError
from commandbus.logger import safe_logger
from commandbus.model.reconnect_backoff import Backoff

log = safe_logger(__name__)

_LOOK_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


class Watcher:
    """`find` returns the live server; `revive` starts one that died, does nothing after a stop, and may raise."""

    def __init__(self, find: Callable[[], Postmaster | None], revive: Callable[[], None]) -> None:
        self._find = find
        self._revive = revive
        self._ending, self._end = os.pipe()
        self._is_ending = False
        self._lock = threading.Lock()
        self._backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._thread = threading.Thread(target=self._run, name="commandbus-embedded-watcher", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to end. It may still be reviving the server: `join` waits for that."""
        with self._lock:
            self._is_ending = True
            os.write(self._end, b".")

    def join(self) -> None:
        """After `end`, and without locks that `revive` needs."""
        self._thread.join()

    def forget(self) -> None:
        """In a forked child, which the thread is not in: close the copies of its descriptors."""
        os.close(self._ending)
        os.close(self._end)

    def _run(self) -> None:
        while not self._is_ending:
            self._look_and_wait()
        with self._lock:  # `end` has written by now
            os.close(self._ending)
            os.close(self._end)

    def _look_and_wait(self) -> None:
        try:
            self._look()
        except EmbeddedPostgresError as error:
            log.error("embedded PostgreSQL is down and could not be started again: %s", error)  # noqa: TRY400
            self._wait(self._backoff.next())

    def _look(self) -> None:
        server = self._find()
        if server is None:
            self._revive()
            server = self._find()
        if server is None:
            self._wait(_LOOK_SECONDS)
        else:
            self._backoff.reset()
            self._wait_for_end_of(server)

    def _wait_for_end_of(self, server: Postmaster) -> None:
        try:
            process = os.pidfd_open(server.pid)
        except (AttributeError, OSError):
            self._wait(_LOOK_SECONDS)
            return
        try:
            if self._find() == server:  # otherwise the pid may belong to another process by now
                self._wait(None, process)
        finally:
            os.close(process)

    def _wait(self, seconds: float | None, *descriptors: int) -> None:
        poll = select.poll()
        for descriptor in (self._ending, *descriptors):
            poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(InterruptedError):
            poll.poll(None if seconds is None else seconds * 1000)
